"""Overlapped steps: the next step is planned and submitted before the oldest is collected.

With a depth of 1 the device has the next step before the host knows the tokens of this one:

    host      plan 1 | plan 2 | collect 1 | plan 3 | collect 2 | …
    device             ▐ step 1 ─────────▌ step 2 ───────────▌ …

While a step is planned, and only then, sequences are as they will be after the steps in flight
(`assume`): their tokens are computed, and each sampled token is a placeholder
(`core.plan.sampled_in`). Afterwards all of that is reverted. Worked example, 9 tokens known:

    step 7 runs     computes token 8, and samples token 9
    step 8 is planned with 10 tokens known, 9 computed: one row, start 9, [-8]
    afterwards      9 tokens known, 8 computed, until step 7 is collected

No token is assumed for a sequence whose grammar, penalties or draft tokens depend on it, whose
forks are to share its prompt, or that ends with it: it counts as computed to its end, and is
stalled until the step is collected.

Pipeline stages overlap steps too, but the first stage does not know the tokens that the last has
yet to sample: none is assumed, and decodes are divided among the steps (`select_rows`).

    4 sequences, depth 1      a b run | c d are planned | a b are collected, and planned again | …

A sequence that ends or is preempted meanwhile is dropped from the steps in flight: results for it
are ignored. Its blocks are free at once, for their next owner writes after those steps.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
from msgspec.structs import replace

from headway.core.plan import ScheduledSequence, StepPlan, StepResult, sampled_in
from headway.engine.grammar.masks import StepMasks
from headway.engine.kv import KVCache
from headway.engine.kv.prefix import first_visible
from headway.engine.policy.policy import list_decodes
from headway.engine.sequence import FINISHED, RUNNING, Sequence
from headway.engine.speculation.step import StepDrafts

NO_ASSUMPTION = nullcontext()
"""The context without steps in flight."""


class StepInFlight(msgspec.Struct, kw_only=True, eq=False):
    """A step that was submitted and not collected; `sequences` are those of its rows, in order.

    `started_s` and `planned_s` are when its planning began and ended; `first` is the result of
    `recording.count_first_scheduled`. `error` is what submitting it raised.
    """

    plan: StepPlan
    started_s: float
    planned_s: float
    drafts: StepDrafts
    sequences: list[Sequence] = []
    first: tuple[int, int, dict[str, int]] = (0, 0, {})
    is_ahead: bool = False
    """Whether another ran when it was planned."""
    masks: StepMasks | None = None
    error: Exception | None = None
    released_ids: set[int] = set()
    """Ids of sequences that ended or were preempted after it was planned."""

    @property
    def rows(self) -> Iterator[tuple[ScheduledSequence, Sequence]]:
        """Yield the rows of sequences that were not released."""
        for row, sequence in zip(self.plan.scheduled, self.sequences, strict=True):
            if row.sequence_id not in self.released_ids:
                yield row, sequence

    def find(self, sequence_id: int) -> Sequence | None:
        """Return the sequence of a row, if it has not ended."""
        alive = (s for s in self.sequences if s.state != FINISHED)
        return next((s for s in alive if s.sequence_id == sequence_id), None)

    def filter_result(self, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Return its plan and result without the sequences that were released."""
        released = self.released_ids
        if not released:
            return self.plan, result
        scheduled = [row for row in self.plan.scheduled if row.sequence_id not in released]
        samples = [sample for sample in result.samples if sample.sequence_id not in released]
        prompts = [each for each in result.prompt_logprobs if each.sequence_id not in released]
        plan = replace(self.plan, scheduled=scheduled)
        return plan, replace(result, samples=samples, prompt_logprobs=prompts)

    def resolve(self) -> StepPlan:
        """Return the plan with tokens for placeholders, once all steps before it are collected."""
        rows = []
        for row, sequence in self.rows:
            end = row.start + len(row.token_ids) - row.num_drafts
            rows.append(replace(row, token_ids=sequence.tokens[row.start : end] + row.drafts))
        return replace(self.plan, scheduled=rows)


class Overlap:
    """The steps in flight, oldest first; at most `depth` and the one that is collected."""

    def __init__(self, depth: int = 0, *, stages: int = 1) -> None:
        self.depth = depth
        self.foresees = stages == 1
        self.steps: deque[StepInFlight] = deque()
        self._before: dict[int, tuple[Sequence, int, int]] = {}
        """While a step is planned: by id (sequence, tokens before, computed tokens before)."""
        self._again: list[tuple[Sequence, int]] = []
        """Sequences of abandoned steps, and the number of tokens they would have computed."""

    @property
    def may_plan(self) -> bool:
        """Return whether another step may be planned before the oldest is collected.

        Not while sequences of an abandoned step are computed again: if one of them raises, it must
        be known which.
        """
        if not self.steps:
            return True
        if self.steps[-1].error is not None or len(self.steps) > self.depth:
            return False
        self._again = [
            (sequence, end)
            for sequence, end in self._again
            if sequence.state != FINISHED and sequence.computed < end
        ]
        return not self._again

    def assume(self, *, foresees: bool) -> AbstractContextManager[None]:
        """Return a context in which sequences are as they will be after the steps in flight.

        Without `foresees` no sampled token is assumed: draft tokens depend on the tokens.
        """
        foresees = foresees and self.foresees
        return self._assume(foresees=foresees) if self.steps else NO_ASSUMPTION

    def select_rows(self, running: list[Sequence]) -> list[Sequence]:
        """Return those of `running` that the next step may advance.

        Where no token is assumed, each of the steps in flight gets an equal part of the decodes.
        """
        if self.foresees or not self.depth:
            return running
        due = list_decodes(running)
        count = len(due) + sum(map(is_stalled, running))
        later = {sequence.sequence_id for sequence in due[-(-count // (self.depth + 1)) :]}
        return [sequence for sequence in running if sequence.sequence_id not in later]

    @contextmanager
    def _assume(self, *, foresees: bool) -> Iterator[None]:
        for step in self.steps:
            for row, sequence in step.rows:
                before = sequence, len(sequence.tokens), sequence.computed
                self._before.setdefault(row.sequence_id, before)
                sequence.computed = row.start + len(row.token_ids) - row.num_drafts
                if row.sample and foresees and not row.num_drafts and is_predictable(sequence):
                    sequence.tokens.append(sampled_in(step.plan.step))
        try:
            yield
        finally:
            for sequence, *_ in list(self._before.values()):
                self.revert(sequence)

    def revert(self, sequence: Sequence) -> None:
        """Revert what is assumed of `sequence`."""
        before = self._before.pop(sequence.sequence_id, None)
        if before is not None:
            _, num_tokens, sequence.computed = before
            del sequence.tokens[num_tokens:]
            if sequence.chain is not None:
                sequence.chain.cut(num_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Drop `sequence` from the steps in flight."""
        for step in self.steps:
            step.released_ids.add(sequence.sequence_id)

    def copies(self, sequence: Sequence) -> bool:
        """Return whether a step in flight copies a block for `sequence`."""
        sequence_id = sequence.sequence_id
        return any(copy.sequence_id == sequence_id for s in self.steps for copy in s.plan.copies)

    def compute_again(self, rows: list[tuple[ScheduledSequence, Sequence]]) -> None:
        """Run steps one by one until these rows of abandoned steps are computed."""
        ends = {sequence.sequence_id: (sequence, row.start + 1) for row, sequence in rows}
        self._again += ends.values()


def is_predictable(sequence: Sequence) -> bool:
    """Return whether its next step can be planned before its next token is known.

    That token does not end it, neither a grammar nor penalties depend on it, and no forks wait.
    """
    sampling = sequence.request.sampling
    return (
        len(sequence.tokens) + 1 < sequence.max_len
        and sequence.grammar is None
        and not sequence.forks
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty == 1
    )


def is_stalled(sequence: Sequence) -> bool:
    """Return whether nothing of it can be planned before a step in flight is collected."""
    return sequence.state == RUNNING and sequence.computed == len(sequence.tokens)


def holds_context(sequence: Sequence, kv: KVCache) -> bool:
    """Return whether `sequence` holds all blocks that its next token sees.

    A step planned ahead releases blocks that later tokens do not see.
    """
    return all(
        first_live <= first_visible(sequence.computed, window) // kv.block_size
        for first_live, window in zip(sequence.first_live, kv.windows, strict=True)
    )


def is_nothing(plan: StepPlan) -> bool:
    """Return whether the runtime has nothing to do and nothing to forget."""
    advances = plan.scheduled or plan.finished
    return not (advances or plan.transfers or plan.copies or plan.forget)
