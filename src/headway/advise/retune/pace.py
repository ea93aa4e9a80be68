"""Steps at the machine's pace of the very moments in which they are simulated.

What others have of the machine, and when, is no setting's doing: a bad second of the server is a
bad second of its simulation. Worked example, in ms from the beginning:

    it was       0 to 10 a step that is expected to take 10, then 10 to 50 another such
    simulated    one of 12 that begins at 5: 5 of it until 10, the other 7 at a quarter: until 38
"""

from bisect import bisect_right
from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from headway.advise.simulate.mean import InTurn
from headway.advise.simulate.truth import CALIBRATED, EMPTY_STEP_S, Fit, Floats, Reach
from headway.engine.cost import Work

Steps = tuple[Floats, NDArray[np.intp]]
"""When some steps began, in seconds from the beginning, and which these are of all."""


class InTime:
    """A truth whose `now_s` is to say how long ago the simulation began."""

    def __init__(
        self, fit: Fit, began_s: Floats, inside: NDArray[np.intp], scale: float = 1.0
    ) -> None:
        """Of those steps of a fit that are `inside`, which began then, in their order."""
        self.label, self.reach = CALIBRATED, Reach(fit.most)
        self.now_s: Callable[[], float] = lambda: 0.0
        self._mean, self._scale = InTurn(fit.mean), scale
        expected, took = fit.expected[inside], fit.took[inside]
        self._usual = float(expected.sum() / took.sum())
        following_s = np.append(began_s[1:], inf)
        end_s = np.minimum(began_s + took, following_s)
        idle = self._usual * (following_s - end_s)
        self._at_s = np.stack([began_s, end_s], axis=1).ravel().tolist()
        self._done = [0.0, *np.cumsum(np.stack([expected, idle], axis=1).ravel()[:-1]).tolist()]

    def seconds(self, work: Work) -> float:
        """How long the step takes that does `work`, if it begins now."""
        if not work.num_tokens:
            return EMPTY_STEP_S * self._scale
        now_s = self.now_s()
        return self.when_s(self.done_by(now_s) + self._scale * self._mean.seconds(work)) - now_s

    def done_by(self, at_s: float) -> float:
        """How much of expected work it could do from the first step on by then."""
        return along(self._at_s, self._done, at_s, self._usual)

    def when_s(self, done: float) -> float:
        """When it has done so much."""
        return along(self._done, self._at_s, done, 1 / self._usual)


def along(xs: list[float], ys: list[float], x: float, slope: float) -> float:
    """The y of an x on a line through these points, beyond them with that slope."""
    if x < xs[0]:
        return ys[0] + (x - xs[0]) * slope
    if x >= xs[-1]:
        return ys[-1] + (x - xs[-1]) * slope
    k = bisect_right(xs, x)
    return ys[k - 1] + (x - xs[k - 1]) / (xs[k] - xs[k - 1]) * (ys[k] - ys[k - 1])
