"""What the scheduler asks of whoever guesses, and what it hears back."""

from collections.abc import Sequence as TypingSequence
from typing import NamedTuple, Protocol

from headway.core.plan import Sample, StepResult
from headway.engine.cost import Work
from headway.engine.sequence import Sequence
from headway.engine.speculation.lookup import Match
from headway.telemetry.records import StepRecord


class Drafts(NamedTuple):
    """Guesses of what follows a sequence's known tokens, and who made them.

    `match` is what the source knows of their worth, the length of what it found again, say, or the
    kind of each; `propose` asks the runtime's drafter for so many guesses of what follows this
    step.
    """

    token_ids: list[int]
    source: str = ""
    match: Match = 0
    propose: int = 0


NO_DRAFTS = Drafts([])


class Speculator(Protocol):
    """Says in each step whose guesses are verified, and learns from what came of them.

    Where it `jumps`, tokens that a grammar forces are known at once, without a draw. `failure` says
    why the runtime's drafter is not asked, "" where it is.
    """

    jumps: bool

    @property
    def failure(self) -> str: ...

    @property
    def drafting_s(self) -> float:
        """What the runtime's drafter is going to take in the step that was planned last."""
        ...

    def looks(self, num_decodes: int) -> bool:
        """Whether the next step, with so many decodes, asks `plan` for guesses. One that does not
        has none, and brings tokens of which nobody is to hear."""
        ...

    def rested(self, sequences: TypingSequence[Sequence]) -> None:
        """The next step has no guesses; these of its decodes may be new, or are to be heard of."""
        ...

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        beside: Work,
        budget: int,
        most_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        """By sequence id the guesses to verify in a step that does `beside` without them.

        At most `budget` tokens in all; with them the step should last no longer than `most_s`.
        Where `prompts_wait`, what guesses take is taken from them.
        """
        ...

    def planned(self, num_prompt_tokens: int, choose_s: float) -> None:
        """The step that was planned last also computes so many tokens of prompts; to choose its
        guesses took so long."""
        ...

    def first(self, sequence: Sequence, start: int) -> int:
        """How many guesses the runtime's drafter makes behind the token that comes next.

        Asked where a step samples without having been planned as a decode: where a prompt ends, of
        which this step computes what is behind `start`.
        """
        ...

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """All but the last token of `sample` were right; `sequence` has them by now.

        Called for everybody who got a token, with or without drafts, but for some of whom it does
        not hear (`hears`).
        """
        ...

    def hears(self, sequence: Sequence) -> bool:
        """Whether `came` has to tell of the next token of `sequence`, and when that is there. What
        nobody heard of is in `Sequence.tokens` when it is looked at again."""
        ...

    def ended(self, result: StepResult, num_unheard: int) -> None:
        """The step is over, and every sample of it was told, but so many of whom nobody hears."""
        ...

    def timed(self, record: StepRecord) -> None:
        """How long the step took, beside what was foretold."""
        ...

    def left(self, sequence: Sequence) -> None:
        """A sequence is over, or was preempted: what is kept for its next step is of no use."""
        ...

    def forget_owner(self, owner: bytes) -> None:
        """Nothing is guessed again from what belongs to `owner` (`Principal.block_owner`)."""
        ...


def num_alike(some: list[int], others: list[int]) -> int:
    """With how many equal tokens two lists begin.

    >>> num_alike([1, 2, 3], [1, 2, 4, 5])
    2
    """
    count = 0
    for a, b in zip(some, others):
        if a != b:
            break
        count += 1
    return count


def fitting(sequence: Sequence, guesses: list[int], most: int) -> list[int]:
    """The first `most` guesses that may follow `sequence`: the last token it may have is sampled.

    What its grammar forbids cannot come, and behind a token that ends it nothing comes.
    """
    most = min(most, sequence.max_len - len(sequence.tokens) - 1)
    if most <= 0:
        return []
    guesses = guesses[:most]
    least = sequence.num_prompt + sequence.request.sampling.min_tokens
    for at, token_id in enumerate(guesses, len(sequence.tokens) + 1):
        if token_id in sequence.stop_ids and at > least:
            guesses = guesses[: at - len(sequence.tokens)]
            break
    if sequence.grammar is not None:
        guesses = guesses[: sequence.grammar.num_allowed(guesses)]
    return guesses
