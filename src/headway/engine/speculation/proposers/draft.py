"""Proposer for the runtime's drafter: a draft model, Medusa heads or an EAGLE layer.

The drafter runs after the sampling of a step (`core.plan.ScheduledSequence.propose`), and the next
step verifies its tokens. Its time is learned from the steps in which it ran. A failed drafter is
tried again after a pause, a few times:

    fails   10 s of steps   fails   20 s   fails   40 s   fails   off until the engine restarts
"""

import logging
from math import inf

from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample, StepResult
from headway.engine.sequence import Sequence
from headway.engine.speculation.controller import Drafting
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.proposal import NO_PROPOSAL, Proposal
from headway.perf.model import StepModel, Work

log = logging.getLogger(__name__)

PAUSES_S = (10.0, 20.0, 40.0)
"""Pause after each failure, in seconds of steps."""
OFF = "off until the engine starts anew"
GOOD_STEPS = 1000
"""Successful steps after which earlier failures are forgotten."""
DECAY = 0.98
"""Weight of an observed duration after the next one."""
MAX_OVERRUN = 2.0
"""Maximum factor of an observed over the predicted duration: the drafter may have computed a long
prompt first."""
ASK_S = 1e-4
"""Prior of a call, for any size: calls, tensors, the draw."""
PRIOR_DEPTHS = (1, 8)
"""Depths at which the prior counts as one observation each, always."""


class DrafterCost:
    """Predicted seconds of the drafter: a line over the depth, fitted by least squares.

    `share` is the bytes read by a pass as a share of the model's step; heads draft `at_once`.
    """

    def __init__(self, cost: StepModel, share: float, *, at_once: bool = False) -> None:
        self._cost, self._share, self._at_once = cost, share, at_once
        self._prior: Drafting | None = None
        self._sums = [0.0] * 5
        """Decayed sums: observations, depths, seconds, depths squared, depths times seconds."""

    @property
    def drafting(self) -> Drafting:
        """Return the predicted seconds of a call and of a pass."""
        prior = self._prior
        if prior is None:
            pass_s = self._share * self._cost.seconds(Work(1, 1, 1, 1))
            prior = self._prior = Drafting(pass_s, at_once=self._at_once, ask_s=ASK_S)
        pairs = [(depth, prior.seconds(depth)) for depth in PRIOR_DEPTHS]
        count, depth, seconds, squared, product = (
            observed + sum(known)
            for observed, known in zip(
                self._sums, zip(*[(1.0, d, s, d * d, d * s) for d, s in pairs]), strict=True
            )
        )
        if self._at_once:
            return Drafting(seconds / count, at_once=True)
        pass_s = (count * product - depth * seconds) / (count * squared - depth * depth)
        pass_s = min(max(pass_s, 0.0), seconds / depth)
        return Drafting(pass_s, ask_s=(seconds - pass_s * depth) / count)

    def observe(self, depth: int, seconds: float) -> None:
        """Learn from a step in which up to `depth` tokens of each sequence were drafted."""
        seconds = min(seconds, MAX_OVERRUN * self.drafting.seconds(depth))
        new = (1.0, depth, seconds, depth * depth, depth * seconds)
        self._sums = [DECAY * before + more for before, more in zip(self._sums, new, strict=True)]


class DraftProposer:
    """Proposes the drafter's tokens, and tracks its cost and its failures."""

    def __init__(self, config: SpeculationConfig, cost: StepModel) -> None:
        self.name = config.drafter
        at_once = config.medusa is not None
        self.cost = DrafterCost(cost, config.draft_share, at_once=at_once)
        self.failure = ""
        """Why the drafter is not asked, and until when; "" if it is."""
        self._num_failures = self._num_good = 0
        self._pause_s = 0.0
        self._proposals: dict[int, tuple[int, list[int]]] = {}
        """Sequence id → (number of known tokens, draft tokens that follow)."""

    @property
    def has_proposals(self) -> bool:
        """Return whether the drafter has tokens that no step could verify yet."""
        return bool(self._proposals)

    def is_available(self, step_s: float) -> bool:
        """Return whether the drafter may run in a step of `step_s`, outside a pause."""
        if self._pause_s > 0:
            self._pause_s -= step_s
        return self._pause_s <= 0

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return the drafter's next tokens, once."""
        position, token_ids = self._proposals.pop(sequence.sequence_id, (0, NO_PROPOSAL.token_ids))
        if position != len(sequence.tokens):
            return NO_PROPOSAL
        return Proposal(token_ids[:most], 0)

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Keep the drafter's tokens; forced tokens, unknown to it, may take their positions."""
        num_forced = sequence.num_forced
        forced = sequence.tokens[-num_forced:] if num_forced else []
        if sample.drafts[:num_forced] == forced and len(sample.drafts) > num_forced:
            token_ids = sample.drafts[num_forced:]
            self._proposals[sequence.sequence_id] = len(sequence.tokens), token_ids

    def forget(self, sequence: Sequence) -> None:
        self._proposals.pop(sequence.sequence_id, None)

    def forget_owner(self, owner: bytes) -> None:
        pass

    def end_step(self, result: StepResult) -> None:
        """Learn the drafter's time in this step, or its failure."""
        if result.draft_failure:
            self._fail(result.draft_failure)
        elif result.timings.draft_s:
            self.failure = ""
            self._num_good += 1
            if self._num_good >= GOOD_STEPS:
                self._num_failures = 0
            depth = max([len(sample.drafts) for sample in result.samples], default=0)
            if depth:
                self.cost.observe(depth, result.timings.draft_s)

    def _fail(self, reason: str) -> None:
        """Pause, or stop for good; requests continue without draft tokens."""
        again = self._num_failures < len(PAUSES_S)
        self._pause_s = PAUSES_S[self._num_failures] if again else inf
        self._num_failures, self._num_good = self._num_failures + 1, 0
        until = f"asked again after {self._pause_s:.0f} s of steps" if again else OFF
        self.failure = f"{reason}; {until}"
        log.warning("the drafter failed (%d): %s", self._num_failures, self.failure)
