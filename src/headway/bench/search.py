"""The search for the highest rate that keeps the objectives: first doubling, then halving.

Each rate is tried once, in a run of its own. Attainment falls as the rate rises, but not without
noise, so the answer is the highest rate that was *seen* to keep and lies below one that did not.
"""

import math
from collections.abc import Awaitable, Callable

from headway.bench.report import GoodputPoint

GROWTH = 2.0
PRECISION = 1.1
"""The search ends when the lowest rate that failed is at most 10% above the best."""
MOST_RUNS = 14
LOWEST = 1 / 64
"""How far below the first rate it looks, as a share."""


async def search_rate(
    at_rate: Callable[[float], Awaitable[GoodputPoint]], start: float, highest: float
) -> list[GoodputPoint]:
    """Every rate that was tried, in that order. Start 4, best 13: 4, 8, 16, 11.3, 13.5, 12.3."""
    points: list[GoodputPoint] = []
    kept, failed = 0.0, float("inf")
    rate = min(start, highest)
    while len(points) < MOST_RUNS:
        point = await at_rate(rate)
        points.append(point)
        if point.kept:
            kept = max(kept, rate)
        else:
            failed = min(failed, rate)
        if kept >= highest or failed <= kept * PRECISION or failed < start * LOWEST:
            break
        rate = next_rate(kept, failed, highest)
    return points


def next_rate(kept: float, failed: float, highest: float) -> float:
    """Up while nothing failed, down while nothing kept, else the geometric middle."""
    if failed == float("inf"):
        return min(kept * GROWTH, highest)
    if kept == 0.0:
        return failed / GROWTH
    return math.sqrt(kept * failed)
