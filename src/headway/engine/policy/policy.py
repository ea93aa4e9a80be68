"""What a scheduling policy decides, and what every policy may take for granted.

The scheduler asks in each step who decodes and who catches up next; it looks after rows, tokens
and blocks itself. A policy answers in its own order and hears what came of it:

    decodes(running, waiting)         all of them, for most policies
    turns(running, waiting, ...)      one by one: this sequence, at most so many tokens
    took(sequence, n)                 n tokens of it are in the plan
    victims(running), weaker(...)     who gives up blocks, for a decode or for a newcomer
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from typing import ClassVar, NamedTuple, Protocol, Self

from headway.admit.queue import QueueOrder
from headway.core.clock import Clock
from headway.core.resolve import Settings
from headway.engine.cost import StepCost, Work, work_of
from headway.engine.kv import KVCache
from headway.engine.policy.users import Users
from headway.engine.sequence import RUNNING, Sequence
from headway.engine.slot_rate import SlotRate


class Turn(NamedTuple):
    """`sequence` may catch up by at most `most` tokens.

    Where `firm` is set and it cannot start, for want of rows or blocks, nobody else who waits may
    start in this step: what becomes free is kept for it.
    """

    sequence: Sequence
    most: int
    firm: bool


class Policy(Protocol):
    """Order and amount; one object for the life of an engine.

    `token_s` is what a prompt token takes in its steps at present, `alone_s` what it takes with
    nothing beside it; 0 where it does not predict. The scheduler keeps its `slot_rate`. Where it
    `reclaims`, users above their share give slots to those below it (`engine.reclaim`). By its
    `queue_order` admission forecasts how long a newcomer waits.
    """

    token_s: float
    alone_s: float
    slot_rate: SlotRate
    users: Users
    reclaims: bool
    queue_order: ClassVar[QueueOrder]

    @classmethod
    def make(cls, settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Self:
        """The policy of an engine with these settings."""
        ...

    def arrived(self, sequence: Sequence) -> None:
        """A newcomer is in the queue."""
        ...

    def left(self, sequence: Sequence) -> None:
        """A sequence that had arrived is over."""
        ...

    def matched_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting `sequence` that the prefix cache holds, as far as it looks them up.

        What else a policy keeps of a sequence it attaches in `arrived` as `policy_state`.
        """
        ...

    def take_shed(self) -> list[Sequence]:
        """Those it has given up since it was last asked; the engine ends them with an error."""
        ...

    def decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """Who of `rows`, the running that lack one token, gets it in this step, in order.

        Those left out stand still for a step, and may make way for one of `waiting` (`weaker`).
        """
        ...

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """Who catches up, in order, with `budget` tokens of the step left beside `decodes`.

        `waiting` loses those who start while the turns are taken.
        """
        ...

    def took(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes `num_tokens` of `sequence`."""
        ...

    def beside_drafts(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """What the step does for `decodes`, how long it may last with guesses beside them, and
        whether prompts wait for what they take."""
        ...

    def drafted(self, sequence: Sequence, num_drafts: int) -> None:
        """The step also verifies so many guesses of `sequence`, which it took a token of."""
        ...

    def drafts_for(self, seconds: float) -> None:
        """For so long the step also makes guesses for the next."""
        ...

    def kept(self, sequence: Sequence, num_drafts: int) -> None:
        """So many guesses were right: tokens beside the one that the step took."""
        ...

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """`running` in the order in which they give up their blocks to a decode without one."""
        ...

    def weaker(self, newcomer: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of `running` that make way for `newcomer` to start, in order; mostly nobody."""
        ...

    def may_take(self, taker: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Whether `taker`, of a user below its share, may go before all others of `waiting`."""
        ...

    def may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        """Whether `sequence` may give its slot to `taker`, of a user below its share."""
        ...


def is_behind(sequence: Sequence) -> bool:
    """Whether a running sequence lacks more than the tokens of a decode."""
    missing = len(sequence.tokens) - sequence.computed
    return sequence.state == RUNNING and missing > 1 + sequence.num_forced


def decoding(running: list[Sequence]) -> list[Sequence]:
    """The running sequences that lack one token to be sampled from, and else only forced ones."""
    return [
        s
        for s in running
        if s.state == RUNNING and 1 <= len(s.tokens) - s.computed <= 1 + s.num_forced
    ]


def behind(running: list[Sequence]) -> list[Sequence]:
    """The running sequences that lack more than the tokens of a decode."""
    return [s for s in running if is_behind(s)]


def decode_work(decodes: TypingSequence[Sequence], windows: tuple[int, ...]) -> Work:
    """What `decodes` do, their forced tokens included; `windows` by KV group."""
    work = work_of([s.computed for s in decodes], windows)
    for sequence in [s for s in decodes if s.num_forced]:
        if sequence.num_missing > 1:
            work = work.with_tokens(sequence.computed + 1, sequence.num_missing - 1, len(windows))
    return work
