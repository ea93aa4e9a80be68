"""One step of the filter behind `engine.cost`: in Python, and compiled, with the same bits.

The filter's state lies in one array of doubles: its constants, the logarithm of each part's
seconds, the seconds, the covariance of the logarithms, and that of what changes with time. A step
is a few of the parts, each with its share of the predicted seconds (Kalman 1960, a measurement of
one number):

    covariance   1.00 0.90    shares 0.5 0.5    spread = covariance · shares = 0.95 0.95
                 0.90 1.00                      known  = shares · spread     = 0.95

    the step took e times as long as was said: with a variance of 0.05 of its own both
    logarithms rise by 0.95 / (0.95 + 0.05) = 0.95, and what is not known falls by 0.95² = 0.90

`native/learning.cpp` does the same operations in the same order on the same memory. A step of it
takes 2 µs, of Python 20 to 40: three matrices of 13 KB, a call of numpy for each operation.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import exp, sqrt

import numpy as np

from headway.engine.knots import NUM_KNOTS, rising

ANY_SAMPLED, SAMPLED, ATTENDED, READ = range(NUM_KNOTS, NUM_KNOTS + 4)
NUM_PARTS = NUM_KNOTS + 4
NUM_CONSTANTS = 6
LAYOUT = 1
"""Of the array and of the call; what is compiled of another one is not used."""

Learn = Callable[[int, int, int, int, int, int, float, float], list[float]]
"""(knot above, tokens between the knots, tokens beyond the lower, sampled, attended, read,
predicted seconds, error) → the parts that follow. `error` is the logarithm of actual over
predicted seconds."""


class State:
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
    def empty(cls, clip: float, noise: float, surprised: float, forget: float) -> "State":
        """With these constants: at how many sigma an outlier is clipped, the relative spread of a
        step's seconds, and the shares of `changes` that come back with a step beyond and within."""
        array = np.zeros(NUM_CONSTANTS + 2 * NUM_PARTS * (1 + NUM_PARTS))
        array[:NUM_CONSTANTS] = clip, noise * noise, surprised, forget, NUM_KNOTS, NUM_PARTS
        return cls(array)

    def settle(self) -> list[float]:
        """The parts from their logarithms; where the curve falls, its knots meet."""
        parts = [*map(exp, self.logs.tolist())]
        curve = parts[:NUM_KNOTS]
        if any(low > high for low, high in pairwise(curve)):
            trust = (1 / self.covariance.diagonal()[:NUM_KNOTS]).tolist()
            logs = rising(self.logs[:NUM_KNOTS].tolist(), trust)
            self.logs[:NUM_KNOTS] = logs
            parts[:NUM_KNOTS] = map(exp, logs)
        self.seconds[:] = parts
        return parts

    def learn(
        self, above: int, width: int, beyond: int,
        sampled: int, attended: int, read: int, predicted_s: float, error: float,
    ) -> list[float]:  # fmt: skip
        """A step, as `Learn` says; the reference of what is compiled."""
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


def compiled(state: State) -> Learn | None:
    """`state.learn`, compiled; None where it is not there, or of another version."""
    try:
        from headway.engine import _learning
    except ImportError:
        return None
    if getattr(_learning, "layout", 0) != LAYOUT:
        return None
    return partial(_learning.learn, state.array)


def learner(state: State) -> Learn:
    """Learns with each call on this state, the fastest way there is."""
    return compiled(state) or state.learn
