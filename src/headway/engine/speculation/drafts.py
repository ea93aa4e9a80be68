"""What the scheduler asks of a speculator, and what it hears back."""

from collections.abc import Sequence as TypingSequence
from typing import NamedTuple, Protocol

from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.engine.sequence import Sequence
from headway.perf.model import Work

Match = int | tuple[int, ...]
"""How many tokens were found again before the draft tokens, 0: none; or of what kind each is."""


class Drafts(NamedTuple):
    """Draft tokens that follow a sequence's known tokens, and the proposer that made them.

    `match` is what the proposer knows of their worth; `propose` asks the runtime's drafter for so
    many draft tokens of what follows this step.
    """

    token_ids: list[int]
    source: str = ""
    match: Match = 0
    propose: int = 0


NO_DRAFTS = Drafts([])


class Speculator(Protocol):
    """Says in each step which draft tokens are verified, and learns from what was accepted.

    Where it `jumps`, tokens that a grammar forces are known at once, without a draw. `failure` says
    why the runtime's drafter is not asked, "" where it is. `drafting_s` is what the drafter is
    predicted to take in the step that was planned last.
    """

    jumps: bool

    @property
    def failure(self) -> str: ...

    @property
    def drafting_s(self) -> float: ...

    def is_due(self, num_decodes: int) -> bool:
        """Return whether the next step, with so many decodes, asks `plan` for draft tokens."""
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

        At most `budget` draft tokens in all; with them the step should last no longer than `max_s`.
        Where `prompts_wait`, what draft tokens take is taken from prompts.
        """
        ...

    def num_after_prompt(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens the runtime's drafter drafts behind the first sampled token.

        Asked where a step ends a prompt, of which it computes what is behind `start`.
        """
        ...

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Learn that all but the last token of `sample` were accepted draft tokens; `sequence` has
        them by now. Called where `drafts` were planned, and for first tokens of prompts."""
        ...

    def end_step(self, result: StepResult) -> None:
        """Learn from the result of a step, after all its samples."""
        ...

    def learn(self, record: StepRecord) -> None:
        """Learn from the durations of a step, beside what was predicted of it."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that is over or was preempted."""
        ...

    def forget_owner(self, owner: bytes) -> None:
        """Propose nothing any more that belongs to `owner` (`Principal.block_owner`)."""
        ...


def common_prefix(some: list[int], others: list[int]) -> int:
    """Return with how many equal tokens two lists begin.

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

    What its grammar forbids cannot come, and behind a token that ends it nothing comes.
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
