"""Intervals of shares, and paired tests of two models on the same items.

Binomial tails are exact, and bootstrap draws are the same for the same seed.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""95% of a normal distribution lies within this many standard deviations."""
NUM_DRAWS = 10_000
MAX_CHUNK_ITEMS = 2_000_000
MAX_DISTINCT_PAIRS = 8
Values = NDArray[np.float64]


def wilson(right: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's interval of a share: 8 of 10 right give [0.490, 0.943], 10 of 10 give [0.722,
    1]."""
    if total == 0:
        return 0.0, 1.0
    share, spread = right / total, z * z / total
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / total / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (0.0 if right == 0 else low), (1.0 if right == total else high)


def binomial_tail(successes: int, trials: int) -> float:
    """Return P(X ≥ successes) for a fair coin, exactly: 9 or more heads of 10 have 11 / 1024."""
    ways = total = 1 if successes <= trials else 0
    for k in range(1, trials - successes + 1):
        ways = ways * (trials - k + 1) // k
        total += ways
    share: float = total / 2**trials
    return share


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p of exact McNemar: 1 and 9 give 0.0215.

    `only_first` items are right in A and wrong in B, `only_second` the other way round.
    """
    return min(1.0, 2 * binomial_tail(max(only_first, only_second), only_first + only_second))


def mcnemar_worse(only_first: int, only_second: int) -> float:
    """Return the one-sided p that B is not worse than A: 9 and 1 give 0.0107."""
    return binomial_tail(only_first, only_first + only_second)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm for several tests: [0.01, 0.04, 0.03] → [0.03, 0.06,
    0.06]."""
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
    draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Values:
    """Return `draws` bootstrap values of Σ `values` / Σ `weights` (without weights: the mean).

    A value is the difference of one item, B − A. Items are resampled with replacement within their
    stratum, so the size of a stratum is fixed: 50 questions of a skill stay 50.
    """
    rng = np.random.default_rng(seed)
    pairs_N2 = np.stack([values, np.ones_like(values) if weights is None else weights], axis=1)
    sums_D2 = np.zeros((draws, 2))
    for members in members_of(strata, len(values)):
        sums_D2 += drawn_sums(pairs_N2[members], draws, rng)
    ratios: Values = sums_D2[:, 0] / sums_D2[:, 1]
    return ratios


def drawn_sums(pairs_N2: Values, draws: int, rng: np.random.Generator) -> Values:
    """Return [draws, 2] sums over N pairs, each resampled from these N pairs.

    If there are few distinct pairs, as for right-or-wrong items, one multinomial draw gives the
    counts.
    """
    count = len(pairs_N2)
    kinds_K2, times_K = np.unique(pairs_N2, axis=0, return_counts=True)
    if len(kinds_K2) <= MAX_DISTINCT_PAIRS:
        sums_of_counts: Values = rng.multinomial(count, times_K / count, draws) @ kinds_K2
        return sums_of_counts
    sums_D2 = np.empty((draws, 2))
    step = max(1, MAX_CHUNK_ITEMS // count)
    for at in range(0, draws, step):
        size = min(step, draws - at)
        sums_D2[at : at + size] = pairs_N2[rng.integers(0, count, (size, count))].sum(axis=1)
    return sums_D2


def members_of(strata: Sequence[Hashable] | None, count: int) -> list[NDArray[np.int64]]:
    """Return the positions of each stratum's items: ["a", "b", "a"] gives [0, 2] and [1]."""
    positions: dict[Hashable, list[int]] = {}
    for position, stratum in enumerate(strata if strata is not None else [None] * count):
        positions.setdefault(stratum, []).append(position)
    return [np.array(each) for each in positions.values()]


def interval(draws: Values, outside: float = 0.05) -> tuple[float, float]:
    """Return the central interval of the draws, with `outside` / 2 of them cut off at each end."""
    low, high = np.quantile(draws, [outside / 2, 1 - outside / 2])
    return float(low), float(high)
