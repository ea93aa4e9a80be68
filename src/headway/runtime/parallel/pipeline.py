"""Pipeline stages that compute at the same time: while the last has a step, the others have the
next.

    rank 1   step 1 | step 2 | step 3 | …         the first half of the layers
    rank 0            step 1 | step 2 | …         the second half; it samples

A plan is sent to the earlier stages when it is submitted, and rank 0 computes its own part of the
oldest step when that is collected. Both happen in the order of the plans, so a step reads only what
was written. The other ranks of rank 0's stage get the plan when it computes, so that they serve the
logits of one step before the next. The engine distributes its sequences over the steps in flight,
so no step waits for tokens that another has yet to sample (GPipe's micro-batches, Huang et al.
2019; `engine.overlap`).
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.plan import GrammarMasks, StepPlan, StepResult
from headway.runtime.parallel.frames import StepOrder, encode
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.leader import LeaderExecutor

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 2**15
"""Bytes of a plan that a socket can buffer. Before a longer plan is sent, all submitted steps are
computed: otherwise rank 0 would wait for a stage to read the plan, and the stage for rank 0 to read
its rows."""


@dataclass(slots=True)
class SubmittedStep:
    """A step whose plan was sent to the other ranks, and its outcome on rank 0.

    `masks` is None until it is to be sampled.
    """

    plan: StepPlan
    masks: GrammarMasks | None = None
    is_forwarded: bool = False
    result: StepResult | None = None
    error: Exception | None = None


class PipelineExecutor(LeaderExecutor):
    """The leader of pipeline stages; see `core.plan.OverlappingExecutor`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._steps: deque[SubmittedStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Start the step on the earlier stages."""
        if self._steps and self._steps[-1].masks is None:  # its masks raised: it is never collected
            abandoned = self._steps.pop()
            self._run_all()
            self._finish_without_result(abandoned)
        order = StepOrder(plan)
        if self._steps and len(encode(order)) > MAX_UNREAD_BYTES:
            self._run_all()
        self._others.send(order, self._others.before)
        self._steps.append(SubmittedStep(plan))

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Keep the masks until the rows of the step arrive."""
        assert self._steps[-1].plan.step == step
        self._steps[-1].masks = masks

    def collect(self) -> StepResult:
        """Compute the last layers of the oldest step, and sample."""
        step = self._steps.popleft()
        self._run(step)
        if step.error is not None:
            raise step.error
        assert step.result is not None
        return step.result

    def abandon(self) -> None:
        """Run the steps that were not collected to their end on all stages."""
        steps, self._steps = self._steps, deque()
        for step in steps:
            self._finish_without_result(step)

    def distributions(self) -> list[np.ndarray]:
        """Return `TorchExecutor.distributions` of the step submitted last."""
        last = self._steps.pop()
        self._run_all()
        self._forward_once(last)
        self._steps.append(last)
        return super().distributions()

    def _run_all(self) -> None:
        """Compute the submitted steps, to be collected later."""
        for step in self._steps:
            self._run(step)

    def _run(self, step: SubmittedStep) -> None:
        """Compute the result of a step, or keep its error; RankLostError is raised at once."""
        if step.result is not None or step.error is not None:
            return
        assert step.masks is not None
        try:
            self._forward_once(step)
            self.own.sample(step.plan.step, step.masks)
            step.result = self.own.collect()
            step.result.experts_read += self._experts_read
        except RankLostError:
            raise
        except Exception as error:
            step.error = error

    def _finish_without_result(self, step: SubmittedStep) -> None:
        """Let all stages end a step that will not be collected."""
        try:
            self._forward_once(step)
        except RankLostError:
            raise
        except Exception as error:
            log.warning("abandoned step %d raised: %r", step.plan.step, error)

    def _forward_once(self, step: SubmittedStep) -> None:
        """Run rank 0's layers, unless they have run, and check the other ranks."""
        if step.is_forwarded:
            return
        step.is_forwarded = True
        self._others.send(StepOrder(step.plan), self._others.stage)
        try:
            self._forward(step.plan)
        finally:
            self._check_followers()
