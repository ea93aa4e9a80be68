"""Histogram of the gaps between tokens, with bins 1% wide: five minutes in a few kilobytes.

5,000 tokens a second are 1.5 million gaps in five minutes: sorting them takes a tenth of a second,
adding bins a millisecond. A percentile from the bins is within half a percent of the exact one; the
mean is exact. Gaps below 10 µs (tokens sent together) count as 0.
"""

import numpy as np

from headway.telemetry.snapshot import Percentiles

LOW_S, WIDTH, NUM_BINS = 1e-5, 0.01, 1900
"""Bin i > 0 holds LOW_S · e^(WIDTH · (i − 1)) up to the next; the last one everything above."""


class GapCounts:
    """Number of gaps in each bin, and their sum in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_BINS, dtype=np.int64)
        self.sum_s = 0.0

    def add(self, gaps_s: np.ndarray) -> None:
        """Count some gaps."""
        bins = np.log(np.maximum(gaps_s, LOW_S / 2) / LOW_S) / WIDTH + 1
        places = np.clip(np.floor(bins), 0, NUM_BINS - 1).astype(np.int64)
        self.counts += np.bincount(places, minlength=NUM_BINS)
        self.sum_s += float(gaps_s.sum())

    def merge(self, other: "GapCounts") -> None:
        """Add the counts of `other`."""
        self.counts += other.counts
        self.sum_s += other.sum_s

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def percentiles(self) -> Percentiles:
        """Return the mean, and each percentile as the middle of its bin."""
        count = self.count
        if not count:
            return Percentiles()
        ranks = np.array([0.5, 0.9, 0.95, 0.99]) * (count - 1)
        places = np.searchsorted(np.cumsum(self.counts), ranks, side="right")
        middle = LOW_S * np.exp(WIDTH * (places - 0.5))
        p50, p90, p95, p99 = np.where(places == 0, 0.0, middle).tolist()
        mean = self.sum_s / count
        return Percentiles(count=count, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99)
