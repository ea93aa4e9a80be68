"""What chance alone explains: intervals of shares, and paired tests of two models on one suite.

It is given counts or paired values of items. It promises exact binomial tails, and draws that are
the same for the same seed.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""95% of a normal distribution lies within so many standard deviations."""
DRAWS = 10_000
LARGEST_CHUNK = 2_000_000
FEW_KINDS = 8
Values = NDArray[np.float64]


def wilson(right: int, asked: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share: 8 of 10 right lie in 0.490 … 0.943, 10 of 10 in 0.722 … 1."""
    if asked == 0:
        return 0.0, 1.0
    share, spread = right / asked, z * z / asked
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / asked + spread / asked / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (0.0 if right == 0 else low), (1.0 if right == asked else high)


def binomial_tail(successes: int, trials: int) -> float:
    """P(X ≥ successes) of a fair coin, exactly: 9 or 10 heads of 10 are 11 / 1024."""
    ways = total = 1 if successes <= trials else 0
    for k in range(1, trials - successes + 1):
        ways = ways * (trials - k + 1) // k
        total += ways
    share: float = total / 2**trials
    return share


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided p of exact McNemar: of items that only one of both got right, 1 and 9 are 0.0215.

    `lost` items are right in A and wrong in B, `gained` the other way round.
    """
    return min(1.0, 2 * binomial_tail(max(lost, gained), lost + gained))


def mcnemar_worse(lost: int, gained: int) -> float:
    """One-sided p that B lost items by chance alone: 9 lost and 1 gained are 0.0107."""
    return binomial_tail(lost, lost + gained)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values of several tests at once, by Holm: [0.01, 0.04, 0.03] become [0.03, 0.06, 0.06]."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def paired_bootstrap(
    values: Values,
    weights: Values | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Values:
    """The sum of `values` over the sum of `weights` (the mean, without), of items drawn again.

    A value is what an item's pair says: B − A. Items are drawn with replacement within their
    stratum, whose number of items is no accident: 50 questions of a skill stay 50.
    """
    rng = np.random.default_rng(seed)
    pairs_N2 = np.stack([values, np.ones_like(values) if weights is None else weights], axis=1)
    sums_D2 = np.zeros((draws, 2))
    for members in members_of(strata, len(values)):
        sums_D2 += drawn_sums(pairs_N2[members], draws, rng)
    found: Values = sums_D2[:, 0] / sums_D2[:, 1]
    return found


def drawn_sums(pairs_N2: Values, draws: int, rng: np.random.Generator) -> Values:
    """Sums over N pairs drawn from these N, so many times.

    Where few pairs differ, as with right and wrong, only how often each is drawn is drawn.
    """
    count = len(pairs_N2)
    kinds_K2, times_K = np.unique(pairs_N2, axis=0, return_counts=True)
    if len(kinds_K2) <= FEW_KINDS:
        of_few: Values = rng.multinomial(count, times_K / count, draws) @ kinds_K2
        return of_few
    sums_D2 = np.empty((draws, 2))
    step = max(1, LARGEST_CHUNK // count)
    for at in range(0, draws, step):
        size = min(step, draws - at)
        sums_D2[at : at + size] = pairs_N2[rng.integers(0, count, (size, count))].sum(axis=1)
    return sums_D2


def members_of(strata: Sequence[Hashable] | None, count: int) -> list[NDArray[np.int64]]:
    """The places of each stratum's items: ["a", "b", "a"] are [0, 2] and [1]."""
    places: dict[Hashable, list[int]] = {}
    for place, stratum in enumerate(strata if strata is not None else [None] * count):
        places.setdefault(stratum, []).append(place)
    return [np.array(each) for each in places.values()]


def interval(draws: Values, outside: float = 0.05) -> tuple[float, float]:
    """The middle of the draws, with half of `outside` cut off at each end."""
    low, high = np.quantile(draws, [outside / 2, 1 - outside / 2])
    return float(low), float(high)
