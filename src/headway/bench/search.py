"""The search for the highest rate that keeps the objectives: first doubling, then halving.

Attainment falls as the rate rises, but not without noise: a pause of the machine fails a rate that
the server keeps, and all above it would never be tried. So the failure that would end the search is
tried once more, and where the two runs disagree a third decides:

    4 keeps, 8 fails, 5.7 keeps, 6.7 keeps, 7.3 keeps       8 is less than 10% above 7.3
    8 keeps, 8 keeps                                        so it keeps, in two runs of three
    16 fails, 11.3 fails, 9.5 fails, 8.7 fails, 8.7 fails   the answer is 8

The answer is the highest rate that was *seen* to keep and lies below one that did not.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from headway.bench.report import GoodputPoint

GROWTH = 2.0
PRECISION = 1.1
"""The search ends when the lowest rate that failed is at most 10% above the best."""
MOST_RUNS = 16
LOWEST = 1 / 64
"""How far below the first rate it looks, as a share."""


async def search_rate(
    at_rate: Callable[[float], Awaitable[GoodputPoint]],
    start: float,
    highest: float,
    precision: float = PRECISION,
) -> list[GoodputPoint]:
    """Every run, in that order. Start 4, best 13: 4, 8, 16, 11.3, 13.5, 12.3, and 13.5 again."""
    points: list[GoodputPoint] = []
    rate = min(start, highest)
    while len(points) < MOST_RUNS:
        points.append(await at_rate(rate))
        kept, failed = bounds(points)
        if kept >= highest:
            break
        if failed <= kept * precision or failed < start * LOWEST:
            if is_sure(points, failed):
                break
            rate = failed
        else:
            rate = next_rate(kept, failed, highest)
    return points


def bounds(points: Iterable[GoodputPoint]) -> tuple[float, float]:
    """The highest rate that kept in most of its runs, or 0, and the lowest above it that did not,
    or infinity.

    Where as many of its runs kept as failed, it failed.
    """
    ahead: Counter[float] = Counter()
    for point in points:
        ahead[point.rate] += 1 if point.kept else -1
    kept = max((rate for rate, runs in ahead.items() if runs > 0), default=0.0)
    failed = min((rate for rate, runs in ahead.items() if runs <= 0 and rate > kept), default=None)
    return kept, math.inf if failed is None else failed


def is_sure(points: Iterable[GoodputPoint], failed: float) -> bool:
    """Whether a rate failed in two runs."""
    return sum([p.rate == failed and not p.kept for p in points]) > 1


def next_rate(kept: float, failed: float, highest: float) -> float:
    """Up while nothing failed, down while nothing kept, else the geometric middle."""
    if failed == float("inf"):
        return min(kept * GROWTH, highest)
    if kept == 0.0:
        return failed / GROWTH
    return math.sqrt(kept * failed)
