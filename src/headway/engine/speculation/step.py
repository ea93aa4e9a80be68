"""Draft tokens of one step, from the plan to the accepted count.

The scheduler takes them when it plans the decodes, and reports each sample. Accepted ones count as
computed; rejected ones are overwritten and never listed in the prefix cache.
"""

from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass, field

from headway.core.clock import Clock
from headway.core.plan import Sample, ScheduledSequence, StepPlan, StepResult
from headway.core.records import StepRecord
from headway.core.request import SequenceUpdate
from headway.engine.kv import KVCache
from headway.engine.kv.listing import list_full
from headway.engine.policy import Policy
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator
from headway.perf.model import StepModel, work_done


@dataclass(slots=True, kw_only=True)
class StepDrafts:
    """Draft tokens of one step, by sequence id.

    Choosing them took `choose_s`. `verified` has (proposer, draft tokens, accepted ones) for each
    sequence; `num_forced` tokens were forced by a grammar.
    """

    choose_s: float = 0.0
    verified: list[tuple[str, int, int]] = field(default_factory=list)
    num_forced: int = 0
    by_id: dict[int, Drafts] = field(default_factory=dict)
    scheduled: set[int] = field(default_factory=set)
    """Sequences with draft tokens in the step; one that was preempted may return without them."""


class DraftTracker:
    """The scheduler's part of speculation; without a `speculator` no step has draft tokens.

    `now` are the draft tokens of the step that is being planned or updated.
    """

    def __init__(
        self, kv: KVCache, policy: Policy, speculator: Speculator | None, clock: Clock
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.speculator, self.clock = speculator, clock
        self.now = StepDrafts()

    @property
    def jumps(self) -> bool:
        """Return whether tokens that a grammar forces need not be sampled."""
        return self.speculator is not None and self.speculator.jumps

    @property
    def num_forced(self) -> int:
        """Return the number of tokens in this step that a grammar forced."""
        return self.now.num_forced

    def plan(self, decodes: TypingSequence[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Return each of `decodes` with the number of its known tokens that the step computes.

        Each gets one of `budget` tokens, forced tokens get what fits, and draft tokens are chosen
        from the rest.
        """
        if self.speculator is None:
            return [(sequence, 1) for sequence in decodes]
        planned, spare = list[tuple[Sequence, int]](), max(budget - len(decodes), 0)
        for sequence in decodes:
            num_forced = min(sequence.num_missing - 1, spare) if sequence.num_forced else 0
            planned.append((sequence, 1 + num_forced))
            spare -= num_forced
        self.now = StepDrafts()
        if self.speculator.is_due(len(decodes)):
            self._choose(decodes, spare)
        return planned

    def _choose(self, decodes: TypingSequence[Sequence], spare: int) -> None:
        """Let the speculator choose draft tokens, where `spare` tokens are free."""
        assert self.speculator is not None
        other_work, max_s, waits = self.policy.draft_limits(decodes)
        began_s = self.clock.now_s()
        self.now.by_id = self.speculator.plan(decodes, other_work, spare, max_s, prompts_wait=waits)
        self.now.choose_s = self.clock.now_s() - began_s
        self.policy.reserve_drafting(self.speculator.drafting_s)

    def of(self, sequence: Sequence) -> Drafts:
        """Return the draft tokens of `sequence`."""
        return self.now.by_id.get(sequence.sequence_id, NO_DRAFTS)

    def behind(self, sequence: Sequence, count: int) -> Drafts:
        """Return the draft tokens behind the next `count` tokens, if these are all known ones."""
        if not self.now.by_id or count != sequence.num_missing:
            return NO_DRAFTS
        return self.of(sequence)

    def drop_drafts(self, sequence: Sequence) -> Drafts:
        """Remove the draft tokens of `sequence`, which have no block; returns the rest."""
        drafts = self.now.by_id[sequence.sequence_id]._replace(token_ids=[])
        self.now.by_id[sequence.sequence_id] = drafts
        return drafts

    def add_to(self, row: ScheduledSequence, sequence: Sequence, drafts: Drafts) -> None:
        """Add draft tokens to `row`, whose blocks hold them; after a prompt ask for drafting."""
        if drafts is NO_DRAFTS:
            if self.speculator is not None and row.sample:
                row.propose = self.speculator.num_after_prompt(sequence, row.start)
            return
        row.token_ids += drafts.token_ids
        row.num_drafts, row.propose = len(drafts.token_ids), drafts.propose
        if row.num_drafts:
            self.now.scheduled.add(row.sequence_id)
            self.policy.on_drafts_scheduled(sequence, row.num_drafts)

    def forget_step(self) -> None:
        """Drop the draft tokens of a step that was run without them: nothing is learned."""
        self.now.by_id, self.now.scheduled = {}, set()

    def accept(self, sequence: Sequence, sample: Sample, update: SequenceUpdate) -> None:
        """Count accepted draft tokens of `sample`, which are known now, as computed.

        The numbers of verified and accepted ones are set in `update`.
        """
        if self.speculator is None:
            return
        num_accepted = len(sample.token_ids) - 1
        self.now.num_forced += update.num_forced
        if num_accepted:
            sequence.computed = min(sequence.computed + num_accepted, len(sequence.tokens))
            list_full(self.kv, sequence)
            self.policy.on_drafts_accepted(sequence, num_accepted)
        drafts = self.of(sequence)
        if sequence.sequence_id in self.now.scheduled:
            update.num_drafts, update.num_kept_drafts = len(drafts.token_ids), num_accepted
            self.now.verified.append((drafts.source, update.num_drafts, num_accepted))
        elif drafts is not NO_DRAFTS:
            drafts = drafts._replace(token_ids=[])
        self.speculator.observe(sequence, drafts, sample)

    def end_step(self, result: StepResult) -> None:
        """End the step, after all its samples."""
        if self.speculator is not None:
            self.now.scheduled = set()
            self.speculator.end_step(result)

    def learn(self, record: StepRecord) -> None:
        """Learn from a finished step and its prediction."""
        if self.speculator is not None:
            self.speculator.learn(record)

    def fill(self, record: StepRecord, plan: StepPlan, result: StepResult, cost: StepModel) -> None:
        """Add the verified and accepted draft tokens and their time to `record`.

        A step that was run again in halves has verified none.
        """
        if self.speculator is not None:
            record.draft_failure, record.choose_s = self.speculator.failure, self.now.choose_s
        if not (
            record.num_drafts or record.draft_s or record.num_forced_rows or self.now.num_forced
        ):
            return
        record.num_proposed = sum([len(each.drafts) for each in result.samples])
        record.verified = tuple(self.now.verified)
        record.num_kept_drafts = sum([accepted for _, _, accepted in self.now.verified])
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

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`."""
        if self.speculator is not None:
            self.speculator.forget(sequence)

    def forget_owner(self, owner: bytes) -> None:
        """Stop proposing tokens of `owner` (`Principal.block_owner`) to other sequences."""
        if self.speculator is not None:
            self.speculator.forget_owner(owner)
