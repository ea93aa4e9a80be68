"""The guesses of one step, from the plan to what came of them.

The scheduler asks for them when it plans the decodes and hands over each sample; what was guessed
right is computed, what was wrong is overwritten and never listed in the prefix cache.
"""

from collections.abc import Sequence as TypingSequence

from headway.core.plan import Sample, ScheduledSequence, StepPlan, StepResult
from headway.core.request import SequenceUpdate
from headway.engine.cost import StepCost, work_done
from headway.engine.kv import KVCache
from headway.engine.policy import Policy
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator
from headway.telemetry.records import StepRecord


class StepDrafts:
    """Whose guesses the step verifies; without a `speculator` nobody's."""

    def __init__(self, kv: KVCache, policy: Policy, speculator: Speculator | None) -> None:
        self.kv = kv
        self.policy = policy
        self.speculator = speculator
        self.verified: list[tuple[str, int, int]] = []
        """Of this step's guesses: (who made them, how many of a sequence, how many were right)."""
        self._by_id: dict[int, Drafts] = {}
        self._riding: set[int] = set()
        """Whose guesses are in the step: one that was preempted may come back in it without."""

    def plan(self, decodes: TypingSequence[Sequence], budget: int) -> bool:
        """Guess beside `decodes`, at most `budget` tokens; whether anybody has guesses."""
        if self.speculator is None:
            return False
        self.verified, self._riding = [], set()
        beside, most_s = self.policy.beside_drafts(decodes)
        self._by_id = self.speculator.plan(decodes, beside, max(budget, 0), most_s)
        return bool(self._by_id)

    def of(self, sequence: Sequence) -> Drafts:
        """The guesses that ride with `sequence`."""
        return self._by_id.get(sequence.sequence_id, NO_DRAFTS)

    def leave_out(self, sequence: Sequence) -> Drafts:
        """There is no block for its guesses: what remains without them."""
        drafts = self._by_id[sequence.sequence_id]._replace(token_ids=[])
        self._by_id[sequence.sequence_id] = drafts
        return drafts

    def ride(self, row: ScheduledSequence, sequence: Sequence, drafts: Drafts) -> None:
        """Verify the guesses with `row`, whose blocks hold them."""
        row.token_ids += drafts.token_ids
        row.num_drafts, row.propose = len(drafts.token_ids), drafts.propose
        if row.num_drafts:
            self._riding.add(row.sequence_id)
            self.policy.drafted(sequence, row.num_drafts)

    def forget(self) -> None:
        """The step was run without guesses: nothing is to be learned of them."""
        self._by_id, self._riding = {}, set()

    def keep(self, sequence: Sequence, sample: Sample, update: SequenceUpdate) -> None:
        """The tokens of `sample` are known now; those guessed right are computed as well.

        `update` tells how many were guessed, and how many of them right.
        """
        if self.speculator is None:
            return
        num_kept = len(sample.token_ids) - 1
        if num_kept:
            sequence.computed = min(sequence.computed + num_kept, len(sequence.tokens))
            self.kv.insert(sequence)
            self.policy.kept(sequence, num_kept)
        drafts = self.of(sequence)
        if sequence.sequence_id not in self._riding:
            drafts = drafts._replace(token_ids=[])
        else:
            update.num_drafts, update.num_kept_drafts = len(drafts.token_ids), num_kept
            self.verified.append((drafts.source, len(drafts.token_ids), num_kept))
        self.speculator.came(sequence, drafts, sample)

    def ended(self, result: StepResult) -> None:
        """All samples of the step were told."""
        if self.speculator is not None:
            self.speculator.ended(result)

    def tell(self, record: StepRecord, plan: StepPlan, result: StepResult, cost: StepCost) -> None:
        """Fill in what was guessed, what was right, and what it took; a step that was run again in
        halves has verified nothing."""
        record.num_proposed = sum([len(each.drafts) for each in result.samples])
        record.verified = self.verified
        record.num_kept_drafts = sum([kept for _, _, kept in self.verified])
        if self.verified:
            drafts = [
                (row.start + len(row.token_ids) - row.num_drafts, row.num_drafts)
                for row in plan.scheduled
                if row.num_drafts
            ]
            record.verify_s = cost.drafts_s(work_done(record), drafts)

    def left(self, sequence: Sequence) -> None:
        """The runtime forgets `sequence`."""
        if self.speculator is not None:
            self.speculator.left(sequence)
