"""The interface of a scheduling policy, and what all policies take for granted.

In each step the scheduler asks which sequences decode and which prompts are computed next; rows,
tokens and blocks are its own concern. A policy answers in its order and is told the outcome:

    select_decodes(rows, ...)      running sequences that get their next token: mostly all
    prefill_turns(running, ...)    one by one: a sequence, and how many tokens at most
    on_scheduled(sequence, n)      n tokens of it are in the plan
    victims, preemptible_for       which running sequences give up blocks
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from typing import ClassVar, NamedTuple, Protocol, Self

from headway.admit.queue import QueueOrder
from headway.config.resolve import Settings
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.policy.users import Users
from headway.engine.sequence import RUNNING, Sequence
from headway.perf.model import StepModel, Work, work_of
from headway.perf.rates import SlotRate


class PrefillTurn(NamedTuple):
    """A chance of `sequence` to have at most `max_tokens` of its tokens computed.

    Where `is_blocking` is set and the sequence cannot start for want of slots or blocks, no other
    waiting sequence starts in this step: what becomes free is reserved for it.
    """

    sequence: Sequence
    max_tokens: int
    is_blocking: bool


class Policy(Protocol):
    """The order of sequences and the tokens of each; one object for the life of an engine.

    `prefill_token_s` is the predicted seconds of a prompt token in steps as they are at present,
    `unloaded_token_s` in steps without decodes; 0 where the policy predicts nothing. The scheduler
    updates `slot_rate`. Where it `reclaims`, users above their share give slots to those below it
    (`engine.reclaim`). Admission forecasts waiting times by `queue_order`.
    """

    prefill_token_s: float
    unloaded_token_s: float
    slot_rate: SlotRate
    users: Users
    reclaims: bool
    queue_order: ClassVar[QueueOrder]

    @classmethod
    def make(cls, settings: Settings, cost: StepModel, clock: Clock, kv: KVCache) -> Self:
        """Return the policy of an engine with these settings."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Register a sequence that has joined the queue."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...

    def num_matched_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting `sequence` the prefix cache holds.

        As of the last look-up; 0 where the policy looks nothing up. A policy keeps its own state of
        a sequence as `policy_state`, attached in `add`.
        """
        ...

    def drain_shed(self) -> list[Sequence]:
        """Return the sequences shed since the last call; the engine ends them with an error."""
        ...

    def select_decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """Return those of `rows` that get their next token in this step, in order.

        `rows` are the running sequences that lack one token. The others pause for a step, and may
        be preempted for one of `waiting` (`preemptible_for`).
        """
        ...

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Yield turns of sequences that lack more than a token, in order.

        `budget` tokens of the step remain after `decodes`. Sequences that start leave `waiting`
        while the turns are taken.
        """
        ...

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the step computes `num_tokens` of `sequence`."""
        ...

    def draft_limits(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Return (work of the step for `decodes`, seconds that it may last with draft tokens,
        whether draft tokens take time from waiting prompts)."""
        ...

    def on_drafts_scheduled(self, sequence: Sequence, num_drafts: int) -> None:
        """Note that the step verifies `num_drafts` draft tokens of `sequence` too."""
        ...

    def reserve_drafting(self, seconds: float) -> None:
        """Reserve `seconds` of the step for drafting tokens of the next."""
        ...

    def on_drafts_accepted(self, sequence: Sequence, num_drafts: int) -> None:
        """Note that `num_drafts` draft tokens of `sequence` were accepted."""
        ...

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return `running` in the order of preemption for a decode that lacks a block."""
        ...

    def preemptible_for(self, candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return those of `running` that may be preempted to start `candidate`, in order."""
        ...

    def may_reclaim(self, claimant: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Return whether `claimant`, of a user below its share, may overtake all of `waiting`."""
        ...

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Return whether `sequence` may give its slot to `claimant`, of a user below its share."""
        ...


def needs_prefill(sequence: Sequence) -> bool:
    """Return whether a running sequence lacks more than the tokens of a decode."""
    missing = len(sequence.tokens) - sequence.computed
    return sequence.state == RUNNING and missing > 1 + sequence.num_forced


def list_decodes(running: list[Sequence]) -> list[Sequence]:
    """Return the running sequences that lack one sampled token, and else only forced ones."""
    return [
        s
        for s in running
        if s.state == RUNNING and 1 <= len(s.tokens) - s.computed <= 1 + s.num_forced
    ]


def list_prefills(running: list[Sequence]) -> list[Sequence]:
    """Return the running sequences that lack more than the tokens of a decode."""
    return [s for s in running if needs_prefill(s)]


def decode_work(decodes: TypingSequence[Sequence], windows: tuple[int, ...]) -> Work:
    """Return the work of `decodes`, forced tokens included; `windows` by KV group."""
    work = work_of([s.computed for s in decodes], windows)
    for sequence in [s for s in decodes if s.num_forced]:
        if sequence.num_missing > 1:
            work = work.with_tokens(sequence.computed + 1, sequence.num_missing - 1, len(windows))
    return work
