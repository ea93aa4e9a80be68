"""By how much other settings are better, and how sure that is.

It has two sides: the arrivals are one draw, so it is told in blocks of them, and the machine has
other moments, so it is told over several runs.

    block of 5 s     1   2   3   4           met now 3, 5, 4, 2   then 5, 5, 6, 5 of 6 each
    gained           2   0   2   3           7 of 24, ± 2.5 by how much the blocks differ
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.advise.retune.replay import Seen
from headway.telemetry.lately import BLOCK_S

LEAST_BLOCKS = 5
"""Of a short stretch the blocks are shorter."""
SURE = 1.64
"""Standard errors to the end of a 90% interval."""
CLASS_LOSS, LEAST_OF_CLASS = 0.05, 10
"""No class of at least so many requests may lose more of its requests than this share."""


@dataclass(slots=True)
class Gained:
    """Of the requests, the share that only one setting meets: its mean and standard error."""

    now: float
    then: float
    error: float

    @property
    def ratio(self) -> tuple[float, float, float]:
        """(then / now − 1, from, to): a gain of 90% surety."""
        base = max(self.now, 0.02)
        gain = self.then - self.now
        low, high = gain - SURE * self.error, gain + SURE * self.error
        return gain / base, low / base, high / base


def gained(now: Seen, then: Seen, moments: Sequence[tuple[Seen, Seen]] = ()) -> Gained:
    """`then` beside `now`; `moments` are pairs as well, of which only the spread counts."""
    met = then.met - now.met
    mean = float(met.mean())
    block_s = min(BLOCK_S, max(now.at_s, default=0.0) / LEAST_BLOCKS or BLOCK_S)
    blocks: dict[int, list[float]] = {}
    for at_s, gain in zip(now.at_s, met, strict=True):
        blocks.setdefault(int(at_s // block_s), []).append(float(gain))
    sums = [sum(each) - mean * len(each) for each in blocks.values()]
    count = len(sums)
    by_arrivals = (sum(s * s for s in sums) * count / max(count - 1, 1)) ** 0.5 / len(met)
    means = [float((b.met - a.met).mean()) for a, b in moments]
    by_machine = float(np.std(means)) / len(means) ** 0.5 if means else 0.0
    return Gained(
        now=now.share, then=then.share, error=float((by_arrivals**2 + by_machine**2) ** 0.5)
    )


def loser(now: Seen, then: Seen) -> str:
    """The class that loses most, where that is too much; "" where none does."""
    worst, found = CLASS_LOSS, ""
    for name in sorted(set(now.classes)):
        of_class = np.array(now.classes) == name
        if of_class.sum() < LEAST_OF_CLASS:
            continue
        lost = float((now.met - then.met)[of_class].mean())
        if lost > worst:
            worst, found = lost, name
    return found
