"""Between which numbers of tokens the cost of a step is a straight line.

Kernels are made for certain numbers of rows: products in int4 by two cores took 131, 146, 158 and
151 us with 4, 5, 6 and 8. So knots lie close where few rows are computed, and then apart.
"""

from functools import lru_cache
from itertools import repeat
from operator import gt

import numpy as np

KNOTS: tuple[int, ...] = (
    *range(1, 17),
    *range(18, 33, 2),
    *(40, 48, 56),
    *(1 << power for power in range(6, 15)),
)
"""Tokens at the curve's knots; beyond them it goes on straight."""
NUM_KNOTS = len(KNOTS)
CLOSE = 64
"""Up to so many tokens a list says which knot is above."""
FEW = 512
"""Below so many tokens a list says what the curve is."""
NUMBERS, KNOT_NUMBERS = np.arange(FEW, dtype=float), np.array(KNOTS, dtype=float)
ABOVE = [sum(knot < tokens for knot in KNOTS) for tokens in range(CLOSE + 1)]


def knot_above(tokens: int) -> int:
    """Which knot is the first with so many tokens or more; the last one beyond.

    >>> [KNOTS[knot_above(tokens)] for tokens in (0, 5, 17, 33, 64, 65, 100_000)]
    [1, 5, 18, 40, 64, 128, 16384]
    """
    if tokens <= CLOSE:
        return ABOVE[tokens]
    return min(ABOVE[CLOSE] + (tokens - 1).bit_length() - CLOSE.bit_length() + 1, NUM_KNOTS - 1)


@lru_cache(maxsize=4096)
def place(tokens: int) -> tuple[int, int, int]:
    """(the knot above, how many tokens lie between it and the one below, so many beyond that).

    >>> place(48), place(60), place(1)
    ((25, 8, 8), (27, 8, 4), (1, 1, 0))
    """
    above = max(knot_above(tokens), 1)
    low = KNOTS[above - 1]
    return above, KNOTS[above] - low, max(tokens - low, 0)


def rising(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that fall share their weighted mean.

    >>> rising([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    falls = [*map(gt, values, values[1:])]
    if True not in falls:
        return values[:]
    first, last = falls.index(True), len(falls) - falls[::-1].index(True)
    pools = [*zip(values[:first], weights, repeat(1))]
    for at in range(first, len(values)):
        if at > last and pools[-1][0] <= values[at]:  # the rest rises
            return [mean for mean, _, count in pools for _ in range(count)] + values[at:]
        pool = values[at], weights[at], 1
        while pools and pools[-1][0] > pool[0]:
            mean, more, count = pools.pop()
            both = more + pool[1]
            pool = (mean * more + pool[0] * pool[1]) / both, both, count + pool[2]
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


class Few:
    """The curve at each number of tokens below FEW: made once a step, then looked up.

    >>> few = Few().curve([float(knot) for knot in KNOTS])
    >>> few[1], few[48], len(few)
    (1.0, 48.0, 512)
    """

    def __init__(self) -> None:
        self._of, self._curve = list[float](), list[float]()

    def curve(self, parts: list[float]) -> list[float]:
        """By number of tokens, where the curve has these values at the knots."""
        if self._of is not parts:
            self._of = parts
            self._curve = np.interp(NUMBERS, KNOT_NUMBERS, parts[:NUM_KNOTS]).tolist()
        return self._curve
