"""Interface between the scheduler and a speculator."""

from collections.abc import Sequence as TypingSequence
from typing import NamedTuple, Protocol

from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.engine.sequence import Sequence
from headway.perf.model import Work

Match = int | tuple[int, ...]
"""Number of matched tokens before the draft tokens, 0: none; or the kind of each draft token."""


class Drafts(NamedTuple):
    """Draft tokens that follow a sequence's known tokens, and their proposer.

    `match` informs about their probability; `propose` is the number of tokens that the runtime's
    drafter is asked for after this step.
    """

    token_ids: list[int]
    source: str = ""
    match: Match = 0
    propose: int = 0


NO_DRAFTS = Drafts([])


class Speculator(Protocol):
    """Chooses the draft tokens that a step verifies, and learns from what was accepted.

    With `jumps`, tokens that a grammar forces are known without sampling. `failure` says why the
    runtime's drafter is not asked, "" if it is. `drafting_s` is the predicted time of the drafter
    in the step that was planned last.
    """

    jumps: bool

    @property
    def failure(self) -> str: ...

    @property
    def drafting_s(self) -> float: ...

    def is_due(self, num_decodes: int) -> bool:
        """Return whether the next step, with `num_decodes` decodes, calls `plan`."""
        ...

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        other_work: Work,
        budget: int,
        max_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        """Return by sequence id the drafts to verify in a step that does `other_work` without them.

        At most `budget` draft tokens in all; with them the step should last at most `max_s`. With
        `prompts_wait` the time of draft tokens is taken from prompts.
        """
        ...

    def num_after_prompt(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens the runtime's drafter drafts behind the first sampled token.

        Called if a step ends a prompt, which it computes from `start` on.
        """
        ...

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Learn that all but the last token of `sample` were accepted draft tokens.

        `sequence` has them already. Called if `drafts` were planned, and for first tokens."""
        ...

    def end_step(self, result: StepResult) -> None:
        """Learn from the result of a step, after all its samples."""
        ...

    def learn(self, record: StepRecord) -> None:
        """Learn from the durations of a step, next to its prediction."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that ended or was preempted."""
        ...

    def forget_owner(self, owner: bytes) -> None:
        """Stop proposing tokens of `owner` (`Principal.block_owner`) to other sequences."""
        ...


def common_prefix(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix of two lists.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    count = 0
    for a, b in zip(some, others):
        if a != b:
            break
        count += 1
    return count


def fitting(sequence: Sequence, token_ids: list[int], most: int) -> list[int]:
    """Return the first `most` draft tokens that may follow `sequence`: its last token is sampled.

    Tokens that its grammar forbids are left out, and tokens after its end.
    """
    most = min(most, sequence.max_len - len(sequence.tokens) - 1)
    if most <= 0:
        return []
    token_ids = token_ids[:most]
    least = sequence.num_prompt + sequence.request.sampling.min_tokens
    for at, token_id in enumerate(token_ids, len(sequence.tokens) + 1):
        if token_id in sequence.stop_ids and at > least:
            token_ids = token_ids[: at - len(sequence.tokens)]
            break
    if sequence.grammar is not None:
        token_ids = token_ids[: sequence.grammar.num_allowed(token_ids)]
    return token_ids
