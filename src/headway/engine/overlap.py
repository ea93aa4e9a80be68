"""Steps that are planned while others run: what is taken for granted of these, and what came of it.

With a depth of 1 the device has the next step before the host knows the tokens of this one:

    host      plan 1 | plan 2 | collect 1 | plan 3 | collect 2 | …
    device             ▐ step 1 ─────────▌ step 2 ───────────▌ …

A sequence is as it will be only while a step is planned (`assumed`): what the steps before compute
is computed, and a token that they sample is known as a placeholder (`core.plan.sampled_in`). Then
all of that is taken back, so nothing but the planning ever sees it. Worked example, 9 tokens known:

    step 7 runs     computes token 8, and samples token 9
    step 8 is planned with 10 tokens known, 9 computed: one row, start 9, [-8]
    afterwards      9 tokens known, 8 computed, until step 7 is collected

Nobody's next token is assumed whose grammar, penalties or guesses need to know it, whose siblings
are to share its prompt, or that ends with it: it counts as computed to its end, and stands still
until the step is collected.

Stages of a pipeline have such steps too, but their first knows no token that the last has yet to
draw: nothing is foreseen, and the decodes are dealt to as many steps as there may be (`share`).

    4 sequences, depth 1      a b run | c d are planned | a b are collected, and planned again | …

A sequence that ends or is preempted meanwhile leaves the steps that run: what they say of it is
passed over. Its blocks are free at once, for whoever gets them writes behind those steps.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
from msgspec.structs import replace

from headway.core.plan import ScheduledSequence, StepPlan, StepResult, sampled_in
from headway.engine.grammar.masks import StepMasks
from headway.engine.kv import KVCache
from headway.engine.kv.prefix import first_seen
from headway.engine.policy.policy import list_decodes
from headway.engine.sequence import FINISHED, RUNNING, Sequence
from headway.engine.speculation.step import StepDraftTokens

NO_ASSUMPTION = nullcontext()
"""Where no step is in flight nothing is assumed."""


class StepInFlight(msgspec.Struct, kw_only=True, eq=False):
    """A step that was submitted and not collected, and whom it advances, row by row.

    `started_s` and `planned_s` are when its planning began and ended; `first` is what
    `first_scheduled` found. `error` is what submitting it raised.
    """

    plan: StepPlan
    started_s: float
    planned_s: float
    drafts: StepDraftTokens
    sequences: list[Sequence] = []
    first: tuple[int, int, dict[str, int]] = (0, 0, {})
    is_ahead: bool = False
    """Whether another ran when it was planned."""
    masks: StepMasks | None = None
    error: Exception | None = None
    released_ids: set[int] = set()
    """Sequences that the runtime was to forget since it was planned."""

    @property
    def rows(self) -> Iterator[tuple[ScheduledSequence, Sequence]]:
        """The rows of those that are still in it."""
        for row, sequence in zip(self.plan.scheduled, self.sequences, strict=True):
            if row.sequence_id not in self.released_ids:
                yield row, sequence

    def find(self, sequence_id: int) -> Sequence | None:
        """Whom a row of it advances, if that is not over."""
        alive = (s for s in self.sequences if s.state != FINISHED)
        return next((s for s in alive if s.sequence_id == sequence_id), None)

    def filter_result(self, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Of its plan and its result what is about those that are still in it."""
        left = self.released_ids
        if not left:
            return self.plan, result
        scheduled = [row for row in self.plan.scheduled if row.sequence_id not in left]
        samples = [sample for sample in result.samples if sample.sequence_id not in left]
        prompts = [each for each in result.prompt_logprobs if each.sequence_id not in left]
        plan = replace(self.plan, scheduled=scheduled)
        return plan, replace(result, samples=samples, prompt_logprobs=prompts)

    def resolve(self) -> StepPlan:
        """The plan without placeholders and those who left, once all before it was collected."""
        rows = []
        for row, sequence in self.rows:
            end = row.start + len(row.token_ids) - row.num_drafts
            rows.append(replace(row, token_ids=sequence.tokens[row.start : end] + row.drafts))
        return replace(self.plan, scheduled=rows)


class Overlap:
    """The steps in flight, the oldest first; at most `depth` beside the one that is collected."""

    def __init__(self, depth: int = 0, *, stages: int = 1) -> None:
        self.depth = depth
        self.foresees = stages == 1
        self.steps: deque[StepInFlight] = deque()
        self._before: dict[int, tuple[Sequence, int, int]] = {}
        """While a step is planned: of whom something is assumed, (tokens, computed) before."""
        self._again: list[tuple[Sequence, int]] = []
        """Whom an abandoned step advanced, and how far it would have come."""

    @property
    def may_plan(self) -> bool:
        """Whether another step may be planned before the oldest is collected.

        Not while those are computed again that an abandoned step had advanced: if one of them
        raises, it must be known which.
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
        """Let sequences be as they will be when the steps in flight are done.

        Without `foresees` no sampled token is assumed: somebody guesses from the tokens.
        """
        foresees = foresees and self.foresees
        return self._assume(foresees=foresees) if self.steps else NO_ASSUMPTION

    def select_rows(self, running: list[Sequence]) -> list[Sequence]:
        """Of `running` those that the next step may advance: where nothing is foreseen, of the
        decodes as many as leave each of the steps in flight its own."""
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
        """What is assumed of `sequence` is so no more."""
        before = self._before.pop(sequence.sequence_id, None)
        if before is not None:
            _, num_tokens, sequence.computed = before
            del sequence.tokens[num_tokens:]
            if sequence.chain is not None:
                sequence.chain.cut(num_tokens)

    def drop(self, sequence: Sequence) -> None:
        """The runtime is to forget `sequence`: the steps in flight do not concern it any more."""
        for step in self.steps:
            step.released_ids.add(sequence.sequence_id)

    def copies(self, sequence: Sequence) -> bool:
        """Whether a step in flight copies a block for `sequence`: it is not known to be there."""
        sequence_id = sequence.sequence_id
        return any(copy.sequence_id == sequence_id for s in self.steps for copy in s.plan.copies)

    def compute_again(self, rows: list[tuple[ScheduledSequence, Sequence]]) -> None:
        """These were in steps that are abandoned: steps run one by one until they are as far."""
        ends = {sequence.sequence_id: (sequence, row.start + 1) for row, sequence in rows}
        self._again += ends.values()


def is_predictable(sequence: Sequence) -> bool:
    """Whether its next step can be planned before its next token is known: that does not end it,
    neither a grammar nor penalties ask for it, and no siblings wait for the prompt."""
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
    """Whether nothing of it can be planned before a step in flight is collected."""
    return sequence.state == RUNNING and sequence.computed == len(sequence.tokens)


def holds_context(sequence: Sequence, kv: KVCache) -> bool:
    """Whether `sequence` holds all that its next token will see: a step that was planned ahead
    gives back what the tokens behind do not see."""
    return all(
        first_live <= first_seen(sequence.computed, window) // kv.block_size
        for first_live, window in zip(sequence.first_live, kv.windows, strict=True)
    )


def is_nothing(plan: StepPlan) -> bool:
    """Whether the runtime has nothing to do and nothing to learn."""
    advances = plan.scheduled or plan.finished
    return not (advances or plan.transfers or plan.copies or plan.forget)
