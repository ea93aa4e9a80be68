"""Engines that change their role with the traffic: when one moves between prompts and answers.

Worked example, three engines, of which one prefills; 0.9 are asked for prompts and 0.5 for answers
(`telemetry.demand`):

    fullest pool 0.9 with one prefilling, 0.5 with two: after 30 s one more prefills
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from headway.admit.split import fullest_pool, prefill_engines
from headway.core.clock import Clock
from headway.telemetry.demand import Demand
from headway.telemetry.records import StepRecord

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""So long another division has to be better before an engine changes its role."""
WORTH = 0.85
"""It is better where the fullest pool is at most so full of what it is now."""


@dataclass(slots=True)
class RoleKeeper:
    """Decides how many of `count` engines prefill; `change` is called with each new number."""

    count: int
    num_prefill: int
    demand: Demand
    clock: Clock
    change: Callable[[int], None]
    _since_s: float | None = None

    def on_record(self, record: StepRecord) -> None:
        """An engine has made a step: an engine more or less may be wanted for prompts by now."""
        asked, now_s = self.demand.asked, self.clock.now_s()
        step = self._step(*asked)
        if not step:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < PATIENCE_S:
            return
        self._since_s, self.num_prefill = None, self.num_prefill + step
        log.info(
            "%d of %d engines prefill from now on: prompts ask for %.2f, answers for %.2f",
            *(self.num_prefill, self.count, *asked),
        )
        self.change(self.num_prefill)

    def _step(self, prefill: float, decode: float) -> int:
        """One engine more (1) or less (-1) for prompts, where that is worth it; else 0."""
        wanted = prefill_engines(self.count, prefill, decode)
        step = (wanted > self.num_prefill) - (wanted < self.num_prefill)
        new, now = (
            fullest_pool(self.count, number, prefill, decode)
            for number in (self.num_prefill + step, self.num_prefill)
        )
        return step if new <= WORTH * now else 0
