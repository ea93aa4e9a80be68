"""Percentiles with the mean beside them, and straight lines through points."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from headway.telemetry.formulas import percentiles


class Distribution(msgspec.Struct, kw_only=True):
    """Statistics of many values; percentiles interpolate linearly between neighbours."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    std: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return the distribution of the values that are not None; None when there is none."""
    known = np.array([*values], dtype=float)  # None becomes NaN
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    return Distribution(
        **msgspec.structs.asdict(percentiles(known)),
        min=float(known.min()),
        max=float(known.max()),
        std=float(known.std()),
    )


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (slope, correlation) of the least-squares line; (0, 0) where there is none.

    >>> slope([0, 1, 2], [1, 3, 5])
    (2.0, 1.0)
    """
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0, 0.0
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    dx, dy = xs - xs.mean(), ys - ys.mean()
    both = float((dx * dy).sum())
    rise = both / float((dx * dx).sum())
    return rise, both / float(np.sqrt((dx * dx).sum() * (dy * dy).sum()))
