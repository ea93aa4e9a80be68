"""When the runtime's drafter is asked for guesses, and of which sequences: where that pays.

It guesses behind the sampling of a step what the next step verifies. What it takes is learned from
the steps in which it was asked; where it does not pay it is asked now and then, for what it would
be worth today. One that fails is asked again after a while, and after a few times no more:

    fails   10 s of steps   fails   20 s   fails   40 s   fails   off until the engine starts anew
"""

import logging
from collections.abc import Sequence as TypingSequence
from math import inf

from headway.core.plan import StepResult
from headway.engine.cost import StepCost
from headway.engine.speculation.controller import PlainStep, choose
from headway.engine.speculation.price import DraftPrice
from headway.engine.speculation.rests import IN_VAIN, LEAST_GAIN, ONCE_IN, PATIENCE

log = logging.getLogger(__name__)

PAUSES_S = (10.0, 20.0, 40.0)
"""Seconds of steps until a drafter that has failed so often is asked again."""
OFF = "off until the engine starts anew"
FORGOTTEN = 1000
"""After so many steps of guesses its failures are forgotten."""
PROBE_SHARE = IN_VAIN
"""Of the time, what a drafter that does not pay may take to be seen at all."""


class Asking:
    """How many guesses the drafter is asked for; `price` is what it takes."""

    def __init__(self, price: DraftPrice, cost: StepCost) -> None:
        self.price, self.cost = price, cost
        self._unasked_s = 0.0
        """Seconds of steps since the drafter was asked last."""
        self._num_unpaid = 0
        """Steps since it paid to ask."""
        self.failure = ""
        """Why it is not asked, and until when; "" where it is."""
        self._num_failures = self._num_good = 0
        self._pause_s = 0.0

    def is_able(self, plain: PlainStep) -> bool:
        """Whether it may be asked in this step: it has not failed, or long ago."""
        if self._pause_s > 0:
            self._pause_s -= self.cost.seconds(plain.work)
        return self._pause_s <= 0

    def counts(
        self,
        values: TypingSequence[list[float]],
        plain: PlainStep,
        shares: TypingSequence[float] | None = None,
        least_gain: float = LEAST_GAIN,
    ) -> list[int]:
        """Of each decode how many; `values` are the chances that they will be kept where they are
        verified, in `shares[i]` of cases. They raise the rate by `least_gain` at least."""
        drafting = self.price.drafting
        if self.compares:
            counts = choose(values, plain, self.cost, drafting, shares, least_gain)
            if any(counts):
                self._num_unpaid = 0
                return counts
        return self.probe([min(len(chances), 1) for chances in values], plain)

    @property
    def compares(self) -> bool:
        """Whether it is asked what pays: in each step, but where it does not pay now and then."""
        return self._num_unpaid < PATIENCE or self._num_unpaid % ONCE_IN == 0

    def seconds(self, counts: TypingSequence[int]) -> float:
        """What it takes to guess so many tokens of each decode; the prompt behind a first guess,
        which is computed then, is not counted."""
        if not any(counts):
            return 0.0
        drafting = self.price.drafting
        return drafting.seconds(max(counts)) + sum(counts) * drafting.row_s

    def probe(self, counts: list[int], plain: PlainStep) -> list[int]:
        """It does not pay: one guess of every sequence that has room, `counts`, where that takes
        `PROBE_SHARE` of the time since the last; a pass is what costs, and each of its rows tells
        as much as the first."""
        drafting = self.price.drafting
        self._num_unpaid += 1
        self._unasked_s += self.cost.seconds(plain.work)
        if drafting.seconds(1) + sum(counts) * drafting.row_s > PROBE_SHARE * self._unasked_s:
            return [0] * len(counts)
        self._unasked_s = 0.0
        return counts

    def ended(self, result: StepResult) -> None:
        """What the drafter took in this step."""
        if result.draft_failure:
            self._failed(result.draft_failure)
        elif result.timings.draft_s:
            self._unasked_s, self.failure = 0.0, ""
            self._num_good += 1
            if self._num_good >= FORGOTTEN:
                self._num_failures = 0
            lengths = [len(sample.drafts) for sample in result.samples if sample.drafts]
            self.price.observe(max(lengths, default=0), sum(lengths), result.timings.draft_s)

    def _failed(self, reason: str) -> None:
        """It goes on without guesses: for a while, or for good."""
        again = self._num_failures < len(PAUSES_S)
        self._pause_s = PAUSES_S[self._num_failures] if again else inf
        self._num_failures, self._num_good = self._num_failures + 1, 0
        until = f"asked again after {self._pause_s:.0f} s of steps" if again else OFF
        self.failure = f"{reason}; {until}"
        log.warning("the drafter failed (%d): %s", self._num_failures, self.failure)
