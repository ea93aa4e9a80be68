"""First come, first served: everything follows the order of arrival.

running   a b c       decodes oldest first, then chunks of prompts, oldest first
waiting   d e         d starts when it fits; e never before d
blocks    c is preempted first
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from math import inf
from typing import ClassVar, Self

from headway.admit.queue import QueueOrder
from headway.config.resolve import Settings
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.policy.policy import PrefillTurn, decode_work, list_prefills
from headway.engine.policy.users import Users
from headway.engine.sequence import Sequence
from headway.perf.model import StepModel, Work
from headway.perf.rates import SlotRate


class Fcfs:
    """The policy of arrival order; the queues have it already."""

    prefill_token_s = unloaded_token_s = 0.0
    reclaims = False
    queue_order: ClassVar[QueueOrder] = QueueOrder.ARRIVAL

    def __init__(self, windows: tuple[int, ...] = (0,)) -> None:
        self.windows = windows
        self.slot_rate = SlotRate()
        self.users = Users()

    @classmethod
    def make(cls, settings: Settings, cost: StepModel, clock: Clock, kv: KVCache) -> Self:
        """Return the policy of an engine with these settings."""
        return cls(cost.windows)

    def add(self, sequence: Sequence) -> None:
        """Register its user."""
        self.users.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Unregister its user with its last sequence."""
        self.users.remove(sequence)

    def num_matched_tokens(self, sequence: Sequence) -> int:
        """Return 0: nothing is looked up."""
        return 0

    def drain_shed(self) -> list[Sequence]:
        """Return none: every request is served."""
        return []

    def select_decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """Return all, oldest first."""
        return rows

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Yield running sequences, then waiting ones; each blocks those behind it."""
        for sequence in list_prefills(running):
            yield PrefillTurn(sequence, budget, True)
        head = None
        while waiting and waiting[0] is not head:
            head = waiting[0]
            yield PrefillTurn(head, budget, True)

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Do nothing."""

    def draft_limits(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Return their work and no limit: the budget of prompts is in tokens, not in seconds."""
        return decode_work(decodes, self.windows), inf, False

    def on_drafts_scheduled(self, sequence: Sequence, num_drafts: int) -> None:
        """Do nothing."""

    def reserve_drafting(self, seconds: float) -> None:
        """Do nothing."""

    def on_drafts_accepted(self, sequence: Sequence, num_drafts: int) -> None:
        """Do nothing."""

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return the youngest first."""
        return running[::-1]

    def preemptible_for(self, candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return none: running sequences came first."""
        return []

    def may_reclaim(self, claimant: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Return True for the policies that reclaim."""
        return True

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Return False: running sequences came first."""
        return False
