"""What a step takes by what it does and what ran before it; the machine's own times are `truth`'s.

The engine's cost model believes in what a step computes. Beyond that the rows of a crowd get into
each other's way, and behind a prompt the weights of a small model have to be read again.
"""

import numpy as np
from numpy.typing import NDArray

from headway.perf.model import StepModel, Work

Floats = NDArray[np.float64]
CROWDS = (8, 16, 32, 64, 128)
"""Beyond so many rows a row may take more: their keys and values no longer fit the caches, and a
server that is full has its hands full."""
COLD = 2
"""So many steps behind one with a prompt may take longer: it has taken the caches."""
NEVER_COLD = np.zeros(COLD)


class Mean:
    """What a step takes by what it does, without good and bad times: the engine's own model of it,
    and what a row takes beyond that where it is one of many, and beside a prompt.

    Worked example, 0.02 ms beyond 8 rows, 0.05 beyond 16 and 0.01 beyond 8 beside a prompt: 24
    rows take 16 x 0.02 + 8 x 0.05 = 0.72 ms more than by the model, 0.88 beside a prompt.
    """

    def __init__(self, cost: StepModel, crowd_s: Floats, cold_s: Floats = NEVER_COLD) -> None:
        self.cost, self.cold_s = cost, cold_s.tolist()
        *alone_s, self._beside_s = crowd_s.tolist()
        self._crowd = [(rows, s) for rows, s in zip(CROWDS, alone_s, strict=True) if s]

    def seconds(self, work: Work) -> float:
        """Of one step."""
        seconds, sampled = self.cost.seconds(work), work.num_sampled
        for rows, row_s in self._crowd:
            if sampled > rows:
                seconds += (sampled - rows) * row_s
        if work.num_tokens > sampled > CROWDS[0]:
            seconds += (sampled - CROWDS[0]) * self._beside_s
        return seconds


class InTurn:
    """The mean of steps that run one after the other: behind one with a prompt the first find
    their weights in no cache.

    Worked example, 0.4 and 0.1 ms: a prompt of 20 ms, then decodes of 1.4, 1.1, 1, 1 ms.
    """

    def __init__(self, mean: Mean) -> None:
        self._mean, self._since = mean, COLD

    def seconds(self, work: Work) -> float:
        """Of the next step."""
        seconds = self._mean.seconds(work)
        if work.num_tokens > work.num_sampled:
            self._since = 0
        elif self._since < COLD:
            seconds += self._mean.cold_s[self._since]
            self._since += 1
        return seconds
