"""Stages that compute at once: while the last has a step, the others have the next ones.

    rank 1   step 1 | step 2 | step 3 | …         the first half of the layers
    rank 0            step 1 | step 2 | …         the second half; it draws

A plan goes to the other stages when it is submitted, and rank 0 computes its own part of the oldest
when that is collected: both in the order of the plans, so what a step reads is written. The other
ranks of its stage, which compute its layers with it, get the plan then, so that they have answered
for the logits of one step before the next: a stage of several ranks is as one. The engine
deals its sequences to the steps in flight, so that none waits for what another has yet to draw
(GPipe's micro-batches, Huang et al. 2019; `engine.overlap`).
"""

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.config.resolve import Settings
from headway.core.machine import Machine
from headway.core.plan import GrammarMasks, StepPlan, StepResult
from headway.runtime.checkpoint import Progress
from headway.runtime.parallel.frames import StepOrder, encode
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.leader import LeaderExecutor
from headway.spec import ModelSpec

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 2**15
"""Bytes of a plan of which a socket surely holds some. A longer one is sent when no stage waits for
rank 0 to take its rows, for rank 0 would wait for the stage to take the plan."""


@dataclass(slots=True)
class SubmittedStep:
    """A step whose plan is with the other ranks, and what came of it on rank 0, where it is over.

    Without `masks` it is not to be drawn yet.
    """

    plan: StepPlan
    masks: GrammarMasks | None = None
    is_forwarded: bool = False
    result: StepResult | None = None
    error: Exception | None = None


class PipelineExecutor(LeaderExecutor):
    """The leader of the stages of a pipeline; see `core.plan.OverlappingExecutor`."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        machine: Machine,
        progress: Progress | None = None,
    ) -> None:
        self._steps: deque[SubmittedStep] = deque()
        super().__init__(folder, spec, settings, machine, progress)

    def submit(self, plan: StepPlan) -> None:
        """Let the stages before begin."""
        if self._steps and self._steps[-1].masks is None:  # its masks raised: nobody collects it
            abandoned = self._steps.pop()
            self._run_all()
            self._finish_without_result(abandoned)
        order = StepOrder(plan)
        if self._steps and len(encode(order)) > MAX_UNREAD_BYTES:
            self._run_all()
        self._all.send(order, self._all.before)
        self._steps.append(SubmittedStep(plan))

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Keep the masks until the step's rows are here."""
        assert self._steps[-1].plan.step == step
        self._steps[-1].masks = masks

    def collect(self) -> StepResult:
        """Compute the last layers of the oldest step, and draw."""
        step = self._steps.popleft()
        self._run(step)
        if step.error is not None:
            raise step.error
        assert step.result is not None
        return step.result

    def abandon(self) -> None:
        """Let the steps that were not collected run to their ends on all stages."""
        steps, self._steps = self._steps, deque()
        for step in steps:
            self._finish_without_result(step)

    def distributions(self) -> list[np.ndarray]:
        """`TorchExecutor.distributions`, of the step that was submitted last."""
        last = self._steps.pop()
        self._run_all()
        self._forward_once(last)
        self._steps.append(last)
        return super().distributions()

    def _run_all(self) -> None:
        """Compute what is submitted, to be collected later."""
        for step in self._steps:
            self._run(step)

    def _run(self, step: SubmittedStep) -> None:
        """Find its result, or what it raises; RankLostError is raised at once."""
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
        """Let all stages end it, for nobody."""
        try:
            self._forward_once(step)
        except RankLostError:
            raise
        except Exception as error:
            log.warning("step %d, which was given up, raised: %r", step.plan.step, error)

    def _forward_once(self, step: SubmittedStep) -> None:
        """Rank 0's layers, where they have not run, and how the step went elsewhere."""
        if step.is_forwarded:
            return
        step.is_forwarded = True
        self._all.send(StepOrder(step.plan), self._all.stage)
        try:
            self._forward(step.plan)
        finally:
            self._check_followers()
