"""Search for the highest rate that keeps the objectives: first doubling, then halving.

Attainment falls as the rate rises, but not without noise: a pause of the machine fails a rate that
the server keeps, and no higher rate would be tried. So the failure that would end the search is
repeated, and where the two runs disagree a third decides:

    4 keeps, 8 fails, 5.7 keeps, 6.7 keeps, 7.3 keeps       8 is less than 10% above 7.3
    8 keeps, 8 keeps                                        so it keeps, in two runs of three
    16 fails, 11.3 fails, 9.5 fails, 8.7 fails, 8.7 fails   the answer is 8

The answer is the highest rate that kept in a run and lies below one that did not.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from headway.bench.report import GoodputPoint

GROWTH = 2.0
PRECISION = 1.1
"""The search ends when the lowest rate that failed is at most 10% above the best."""
MAX_RUNS = 16
MIN_RATE_SHARE = 1 / 64
"""Lowest rate that is tried, as a share of the first."""


async def search_rate(
    at_rate: Callable[[float], Awaitable[GoodputPoint]],
    start: float,
    highest: float,
    precision: float = PRECISION,
) -> list[GoodputPoint]:
    """Return every run in order. Start 4, best 13: 4, 8, 16, 11.3, 13.5, 12.3, and 13.5 again."""
    points: list[GoodputPoint] = []
    rate = min(start, highest)
    while len(points) < MAX_RUNS:
        points.append(await at_rate(rate))
        meets_slo, lowest_failed = bounds(points)
        if meets_slo >= highest:
            break
        if lowest_failed <= meets_slo * precision or lowest_failed < start * MIN_RATE_SHARE:
            if has_failed_twice(points, lowest_failed):
                break
            rate = lowest_failed
        else:
            rate = next_rate(meets_slo, lowest_failed, highest)
    return points


def bounds(points: Iterable[GoodputPoint]) -> tuple[float, float]:
    """Return (highest rate that kept in most of its runs, or 0; lowest failed rate above it, or
    infinity).

    A rate failed where as many of its runs kept as failed.
    """
    ahead: Counter[float] = Counter()
    for point in points:
        ahead[point.rate] += 1 if point.meets_slo else -1
    meets_slo = max((rate for rate, runs in ahead.items() if runs > 0), default=0.0)
    lowest_failed = min(
        (rate for rate, runs in ahead.items() if runs <= 0 and rate > meets_slo), default=None
    )
    return meets_slo, math.inf if lowest_failed is None else lowest_failed


def has_failed_twice(points: Iterable[GoodputPoint], failed: float) -> bool:
    """Return whether a rate failed in two runs."""
    return sum([p.rate == failed and not p.meets_slo for p in points]) > 1


def next_rate(meets_slo: float, lowest_failed: float, highest: float) -> float:
    """Return a higher rate while none failed, a lower one while none kept, else the geometric
    mean."""
    if lowest_failed == float("inf"):
        return min(meets_slo * GROWTH, highest)
    if meets_slo == 0.0:
        return lowest_failed / GROWTH
    return math.sqrt(meets_slo * lowest_failed)
