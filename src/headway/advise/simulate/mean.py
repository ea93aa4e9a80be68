"""The mean time of a step by its work and by the steps before it; its variation is in `truth`.

The engine's cost model predicts what a step computes. In addition, many rows slow each other down,
and after a prompt the weights of a small model have to be read again.
"""

import numpy as np
from numpy.typing import NDArray

from headway.perf.model import StepModel, Work

Floats = NDArray[np.float64]
CROWD_ROWS = (8, 16, 32, 64, 128)
"""Numbers of rows beyond which a row may cost more: keys and values no longer fit the caches, and a
full server has more work besides."""
NUM_COLD_STEPS = 2
"""Number of steps after one with a prompt that may take longer, since the prompt has used the
caches."""
NEVER_COLD = np.zeros(NUM_COLD_STEPS)


class MeanStepTime:
    """The mean time of a step by its work: the engine's own cost model, and the additional cost of
    a row that is one of many, or beside a prompt.

    Worked example, 0.02 ms beyond 8 rows, 0.05 beyond 16 and 0.01 beyond 8 beside a prompt: 24 rows
    take 16 x 0.02 + 8 x 0.05 = 0.72 ms more than by the model, 0.88 beside a prompt.
    """

    def __init__(self, cost: StepModel, crowd_s: Floats, cold_s: Floats = NEVER_COLD) -> None:
        self.cost, self.cold_s = cost, cold_s.tolist()
        *alone_s, self._with_prompt_s = crowd_s.tolist()
        self._crowd = [(rows, s) for rows, s in zip(CROWD_ROWS, alone_s, strict=True) if s]

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        seconds, sampled = self.cost.seconds(work), work.num_sampled
        for rows, row_s in self._crowd:
            if sampled > rows:
                seconds += (sampled - rows) * row_s
        if work.num_tokens > sampled > CROWD_ROWS[0]:
            seconds += (sampled - CROWD_ROWS[0]) * self._with_prompt_s
        return seconds


class SequentialMean:
    """The mean of consecutive steps: the first ones after a prompt find their weights in no cache.

    Worked example, 0.4 and 0.1 ms: a prompt of 20 ms, then decodes of 1.4, 1.1, 1, 1 ms.
    """

    def __init__(self, mean: MeanStepTime) -> None:
        self._mean, self._since = mean, NUM_COLD_STEPS

    def seconds(self, work: Work) -> float:
        """Return the seconds of the next step."""
        seconds = self._mean.seconds(work)
        if work.num_tokens > work.num_sampled:
            self._since = 0
        elif self._since < NUM_COLD_STEPS:
            seconds += self._mean.cold_s[self._since]
            self._since += 1
        return seconds
