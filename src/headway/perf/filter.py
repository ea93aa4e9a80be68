"""Kalman filter and curve of `perf.model`, in Python and compiled with identical results.

The curve of seconds over tokens is piecewise linear. Kernels are made for certain numbers of rows:
products in int4 by two cores took 131, 146, 158 and 151 us with 4, 5, 6 and 8. So its breakpoints
are dense for few rows, and then sparse.

The filter's state is one array of doubles: its constants, the logarithm of each part's seconds, the
seconds, the covariance of the logarithms, and the covariance of their drift. A step consists of a
few parts, each with its share of the predicted seconds (Kalman 1960, a scalar measurement):

    covariance   1.00 0.90    shares 0.5 0.5    spread = covariance · shares = 0.95 0.95
                 0.90 1.00                      known  = shares · spread     = 0.95

    the step took e times as long as predicted: with a variance of its own of 0.05 both
    logarithms rise by 0.95 / (0.95 + 0.05) = 0.95, and the uncertainty falls by 0.95² = 0.90

`native/learning.cpp` does the same operations in the same order on the same memory. One update
takes it 2 µs, and Python 20 to 40: three matrices of 13 KB, a call of numpy for each operation.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise, repeat
from math import exp, sqrt
from operator import gt

import numpy as np

BREAKPOINTS: tuple[int, ...] = (
    *range(1, 17),
    *range(18, 33, 2),
    *(40, 48, 56),
    *(1 << power for power in range(6, 15)),
)
"""Tokens at the curve's breakpoints; beyond the last it is linear."""
NUM_BREAKPOINTS = len(BREAKPOINTS)
INDEXED_TOKENS = 64
"""Maximum tokens for which `ABOVE` has the number of the breakpoint above."""
TABLE_TOKENS = 512
"""Number of tokens below which the curve is tabulated."""
TABLE_ARRAY, BREAKPOINT_ARRAY = (
    np.arange(TABLE_TOKENS, dtype=float),
    np.array(BREAKPOINTS, dtype=float),
)
ABOVE = [sum(point < tokens for point in BREAKPOINTS) for tokens in range(INDEXED_TOKENS + 1)]
ANY_SAMPLED, SAMPLED, ATTENDED, READ = range(NUM_BREAKPOINTS, NUM_BREAKPOINTS + 4)
NUM_PARTS = NUM_BREAKPOINTS + 4
NUM_CONSTANTS = 6
LAYOUT = 1
"""Version of the array and of the call; compiled code of another version is not used."""

Learn = Callable[[int, int, int, int, int, int, float, float], list[float]]
"""(breakpoint above, tokens between the two, tokens beyond the lower, sampled, attended, read,
predicted seconds, error) → the new parts. `error` is the logarithm of actual over predicted
seconds."""


def breakpoint_above(tokens: int) -> int:
    """Return the number of the first breakpoint at or above `tokens`; beyond the last, the last.

    >>> [BREAKPOINTS[breakpoint_above(tokens)] for tokens in (0, 5, 17, 33, 64, 65, 100_000)]
    [1, 5, 18, 40, 64, 128, 16384]
    """
    if tokens <= INDEXED_TOKENS:
        return ABOVE[tokens]
    return min(
        ABOVE[INDEXED_TOKENS] + (tokens - 1).bit_length() - INDEXED_TOKENS.bit_length() + 1,
        NUM_BREAKPOINTS - 1,
    )


@lru_cache(maxsize=4096)
def locate(tokens: int) -> tuple[int, int, int]:
    """Return (breakpoint above, tokens between it and the one below, tokens beyond the lower).

    >>> locate(48), locate(60), locate(1)
    ((25, 8, 8), (27, 8, 4), (1, 1, 0))
    """
    above = max(breakpoint_above(tokens), 1)
    low = BREAKPOINTS[above - 1]
    return above, BREAKPOINTS[above] - low, max(tokens - low, 0)


def isotonic_fit(values: list[float], weights: list[float]) -> list[float]:
    """Return the nearest sequence that never falls: falling neighbours share their weighted mean.

    >>> isotonic_fit([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
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


class CurveTable:
    """Table of the curve at each number of tokens below TABLE_TOKENS, computed once a step.

    >>> table = CurveTable().curve([float(tokens) for tokens in BREAKPOINTS])
    >>> table[1], table[48], len(table)
    (1.0, 48.0, 512)
    """

    def __init__(self) -> None:
        self._of, self._curve = list[float](), list[float]()

    def curve(self, parts: list[float]) -> list[float]:
        """Return the curve by number of tokens, given its values at the breakpoints."""
        if self._of is not parts:
            self._of = parts
            self._curve = np.interp(TABLE_ARRAY, BREAKPOINT_ARRAY, parts[:NUM_BREAKPOINTS]).tolist()
        return self._curve


class FilterState:
    """Views on the array of a filter's state."""

    __slots__ = ("_buffer", "array", "changes", "covariance", "logs", "seconds")

    def __init__(self, array: np.ndarray) -> None:
        begin, square = NUM_CONSTANTS + 2 * NUM_PARTS, NUM_PARTS * NUM_PARTS
        shape = NUM_PARTS, NUM_PARTS
        self.array = array
        self.logs = array[NUM_CONSTANTS : NUM_CONSTANTS + NUM_PARTS]
        self.seconds = array[NUM_CONSTANTS + NUM_PARTS : begin]
        self.covariance = array[begin : begin + square].reshape(shape)
        self.changes = array[begin + square :].reshape(shape)
        self._buffer = np.empty(shape)

    @classmethod
    def empty(cls, clip: float, noise: float, surprised: float, forget: float) -> "FilterState":
        """Return a state with these constants.

        They are the sigmas at which an outlier is clipped, the relative spread of a step's seconds,
        and the shares of `changes` that return after an outlier and after a normal step.
        """
        array = np.zeros(NUM_CONSTANTS + 2 * NUM_PARTS * (1 + NUM_PARTS))
        array[:NUM_CONSTANTS] = clip, noise * noise, surprised, forget, NUM_BREAKPOINTS, NUM_PARTS
        return cls(array)

    def settle(self) -> list[float]:
        """Return the parts from their logarithms; where the curve falls, points are averaged."""
        parts = [*map(exp, self.logs.tolist())]
        curve = parts[:NUM_BREAKPOINTS]
        if any(low > high for low, high in pairwise(curve)):
            trust = (1 / self.covariance.diagonal()[:NUM_BREAKPOINTS]).tolist()
            logs = isotonic_fit(self.logs[:NUM_BREAKPOINTS].tolist(), trust)
            self.logs[:NUM_BREAKPOINTS] = logs
            parts[:NUM_BREAKPOINTS] = map(exp, logs)
        self.seconds[:] = parts
        return parts

    def learn(
        self, above: int, width: int, beyond: int,
        sampled: int, attended: int, read: int, predicted_s: float, error: float,
    ) -> list[float]:  # fmt: skip
        """Update the state by one step, see `Learn`; the reference of the compiled code."""
        parts, covariance, buffer = self.seconds.tolist(), self.covariance, self._buffer
        clip, noise, surprised, forget, _, _ = self.array[:NUM_CONSTANTS].tolist()
        some: list[tuple[int, float]] = [(above - 1, 1 - beyond / width), (above, beyond / width)]
        some += [(SAMPLED, sampled), (ATTENDED, attended), (READ, read)]
        some += [(ANY_SAMPLED, 1)] if sampled else []
        shares = [(part, count * parts[part] / predicted_s) for part, count in some]
        spread, known = np.zeros(NUM_PARTS), 0.0
        for part, share in shares:
            spread += share * covariance[part]
        for part, share in shares:
            known += share * float(spread[part])
        excess = max(abs(error) / (clip * sqrt(known + noise)), 1.0)
        variance = known + noise * excess
        self.logs += spread * (error / excess / variance)
        covariance -= np.multiply(spread[:, None], spread / variance, out=buffer)
        np.subtract(self.changes, covariance, out=buffer)
        buffer *= surprised if excess > 1 else forget
        covariance += buffer
        return self.settle()


def compiled_learner(state: FilterState) -> Learn | None:
    """Return the compiled `state.learn`; None if it is missing, or of another version."""
    try:
        from headway.perf import _learning
    except ImportError:
        return None
    if getattr(_learning, "layout", 0) != LAYOUT:
        return None
    return partial(_learning.learn, state.array)


def learner(state: FilterState) -> Learn:
    """Return the fastest available function that updates this state."""
    return compiled_learner(state) or state.learn
