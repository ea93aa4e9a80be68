"""The guesses of one step, from the plan to what came of them.

The scheduler asks for them when it plans the decodes and hands over each sample; what was guessed
right is computed, what was wrong is overwritten and never listed in the prefix cache.
"""

from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass, field

from headway.core.clock import Clock
from headway.core.plan import Sample, ScheduledSequence, StepPlan, StepResult
from headway.core.request import SequenceUpdate
from headway.engine.cost import StepCost, work_done
from headway.engine.kv import KVCache
from headway.engine.kv.listing import insert
from headway.engine.policy import Policy
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator
from headway.telemetry.records import StepRecord


@dataclass(slots=True, kw_only=True)
class Guesses:
    """Those of one step, from its plan to its end.

    It took `choose_s` to choose them. Of them `verified` tells (who made them, how many of a
    sequence, how many were right); `num_forced` tokens came because a grammar forced them.
    """

    choose_s: float = 0.0
    verified: list[tuple[str, int, int]] = field(default_factory=list)
    num_forced: int = 0
    by_id: dict[int, Drafts] = field(default_factory=dict)
    riding: dict[int, Sequence] = field(default_factory=dict)
    """Whose guesses are in the step: one that was preempted may come back in it without."""


class StepDrafts:
    """Whose guesses a step verifies; without a `speculator` nobody's.

    `now` are those of the step that is planned or taken at the moment.
    """

    def __init__(
        self, kv: KVCache, policy: Policy, speculator: Speculator | None, clock: Clock
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.speculator, self.clock = speculator, clock
        self.now = Guesses()

    @property
    def jumps(self) -> bool:
        """Whether tokens that a grammar forces need not be sampled."""
        return self.speculator is not None and self.speculator.jumps

    @property
    def num_forced(self) -> int:
        """Tokens that came in this step because a grammar forced them."""
        return self.now.num_forced

    def plan(self, decodes: TypingSequence[Sequence], budget: int) -> list[tuple[int, int]]:
        """(Place in `decodes`, known tokens that the step computes) of all but the steady ones: of
        `budget` in all one token, and of those that are forced what fits. What is left is for
        guesses. Whose guesses are asked for is not steady, until it is known what came of them."""
        places = [at for at, s in enumerate(decodes) if s.computed >= s.steady_until]
        if self.speculator is None:
            return [(at, 1) for at in places]
        forced, spare = dict[int, int](), max(budget - len(decodes), 0)
        for at in places:
            if decodes[at].num_forced:
                forced[at] = min(decodes[at].num_missing - 1, spare)
                spare -= forced[at]
        self.now = Guesses()
        if self.speculator.looks(len(decodes)):
            self._choose(decodes, spare)
            places = [at for at, s in enumerate(decodes) if s.computed >= s.steady_until]
        else:
            self.speculator.rested([decodes[at] for at in places])
        return [(at, 1 + forced.get(at, 0)) for at in places]

    def _choose(self, decodes: TypingSequence[Sequence], spare: int) -> None:
        """Let the speculator say what is guessed, where `spare` tokens are left."""
        assert self.speculator is not None
        beside, most_s, waits = self.policy.beside_drafts(decodes)
        began_s = self.clock.now_s()
        self.now.by_id = self.speculator.plan(decodes, beside, spare, most_s, prompts_wait=waits)
        self.now.choose_s = self.clock.now_s() - began_s
        self.policy.drafts_for(self.speculator.drafting_s)
        hears, found = self.speculator.hears, self.now.by_id
        for sequence in decodes:
            if sequence.steady_until and (sequence.sequence_id in found or hears(sequence)):
                sequence.steady_until = 0

    def hears(self, sequence: Sequence) -> bool:
        """Whether a speculator is to hear of the next token of `sequence`."""
        return self.speculator is not None and self.speculator.hears(sequence)

    def of(self, sequence: Sequence) -> Drafts:
        """The guesses that ride with `sequence`."""
        return self.now.by_id.get(sequence.sequence_id, NO_DRAFTS)

    def behind(self, sequence: Sequence, count: int) -> Drafts:
        """The guesses behind the next `count` tokens of `sequence`: behind all that are known."""
        if not self.now.by_id or count != sequence.num_missing:
            return NO_DRAFTS
        return self.of(sequence)

    def leave_out(self, sequence: Sequence) -> Drafts:
        """There is no block for its guesses: what remains without them."""
        drafts = self.now.by_id[sequence.sequence_id]._replace(token_ids=[])
        self.now.by_id[sequence.sequence_id] = drafts
        return drafts

    def ride(self, row: ScheduledSequence, sequence: Sequence, drafts: Drafts) -> None:
        """Verify the guesses with `row`, whose blocks hold them; or guess behind a prompt."""
        if drafts is NO_DRAFTS:
            if self.speculator is not None and row.sample:
                row.propose = self.speculator.first(sequence, row.start)
            return
        row.token_ids += drafts.token_ids
        row.num_drafts, row.propose = len(drafts.token_ids), drafts.propose
        if row.num_drafts:
            self.now.riding[row.sequence_id] = sequence
            self.policy.drafted(sequence, row.num_drafts)

    def planned(self, looked_at: TypingSequence[ScheduledSequence]) -> None:
        """Tell the speculator what the step computes beside the decodes; `looked_at` are its rows
        but those of steady decodes."""
        if self.speculator is not None:
            rest = [len(row.token_ids) - 1 - row.num_drafts - row.num_forced for row in looked_at]
            self.speculator.planned(sum(rest), self.now.choose_s)

    def forget(self) -> None:
        """The step was run without guesses: nothing is to be learned of them."""
        self.now.by_id, self.now.riding = {}, {}

    def keep(self, sequence: Sequence, sample: Sample, update: SequenceUpdate) -> None:
        """The tokens of `sample` are known now; those guessed right are computed as well.

        `update` tells how many were guessed, and how many of them right.
        """
        if self.speculator is None:
            return
        num_kept = len(sample.token_ids) - 1
        self.now.num_forced += update.num_forced
        if num_kept:
            sequence.computed = min(sequence.computed + num_kept, len(sequence.tokens))
            insert(self.kv, sequence)
            self.policy.kept(sequence, num_kept)
        drafts = self.of(sequence)
        if sequence.sequence_id in self.now.riding:
            update.num_drafts, update.num_kept_drafts = len(drafts.token_ids), num_kept
            self.now.verified.append((drafts.source, update.num_drafts, num_kept))
        elif drafts is not NO_DRAFTS:
            drafts = drafts._replace(token_ids=[])
        self.speculator.came(sequence, drafts, sample)

    def ended(self, result: StepResult, num_steady: int) -> None:
        """All samples of the step were told, but those of so many steady sequences."""
        if self.speculator is not None:
            if self.now.by_id:
                self.now.riding = {}
            self.speculator.ended(result, num_steady)

    def timed(self, record: StepRecord) -> None:
        """The step was compared with what was foretold of it."""
        if self.speculator is not None:
            self.speculator.timed(record)

    def tell(self, record: StepRecord, plan: StepPlan, result: StepResult, cost: StepCost) -> None:
        """Fill in what was guessed, what was right, and what it took; a step that was run again in
        halves has verified nothing."""
        if self.speculator is not None:
            record.draft_failure, record.choose_s = self.speculator.failure, self.now.choose_s
        if not (
            record.num_drafts or record.draft_s or record.num_forced_rows or self.now.num_forced
        ):
            return
        record.num_proposed = sum([len(each.drafts) for each in result.samples])
        record.verified = tuple(self.now.verified)
        record.num_kept_drafts = sum([kept for _, _, kept in self.now.verified])
        record.num_forced = self.now.num_forced
        if self.now.verified or record.num_forced_rows:
            rows = plan.scheduled
            ends = [row.start + len(row.token_ids) - row.num_drafts for row in rows]
            drafts = [(end, row.num_drafts) for row, end in zip(rows, ends) if row.num_drafts]
            forced = [
                (end - row.num_forced, row.num_forced)
                for row, end in zip(rows, ends)
                if row.num_forced
            ]
            record.verify_s = cost.drafts_s(
                work_done(record), drafts if self.now.verified else (), forced
            )

    def left(self, sequence: Sequence) -> None:
        """The runtime forgets `sequence`."""
        if self.speculator is not None:
            self.speculator.left(sequence)

    def forget_owner(self, owner: bytes) -> None:
        """Nothing is guessed again from what belongs to `owner` (`Principal.block_owner`)."""
        if self.speculator is not None:
            self.speculator.forget_owner(owner)
