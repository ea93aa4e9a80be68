"""First come, first served: the order of arrival is the order of everything.

running   a b c       decodes oldest first, then chunks of prompts, oldest first
waiting   d e         d starts when it fits; e never before d
blocks    c gives up its own first
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from math import inf
from typing import ClassVar, Self

from headway.admit.queue import QueueOrder
from headway.core.clock import Clock
from headway.core.resolve import Settings
from headway.engine.cost import StepCost, Work
from headway.engine.kv import KVCache
from headway.engine.policy.policy import Turn, behind, decode_work
from headway.engine.policy.users import Users
from headway.engine.sequence import Sequence
from headway.engine.slot_rate import SlotRate


class Fcfs:
    """The queues have the order."""

    token_s = alone_s = 0.0
    reclaims = False
    queue_order: ClassVar[QueueOrder] = QueueOrder.ARRIVAL

    def __init__(self, windows: tuple[int, ...] = (0,)) -> None:
        self.windows = windows
        self.slot_rate = SlotRate()
        self.users = Users()

    @classmethod
    def make(cls, settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Self:
        """The policy of an engine with these settings; most need to know nothing of it."""
        return cls(cost.windows)

    def arrived(self, sequence: Sequence) -> None:
        """Its user is present."""
        self.users.arrived(sequence)

    def left(self, sequence: Sequence) -> None:
        """Its user may be gone."""
        self.users.left(sequence)

    def matched_tokens(self, sequence: Sequence) -> int:
        """0: it does not look them up."""
        return 0

    def take_shed(self) -> list[Sequence]:
        """Nobody: all are served."""
        return []

    def decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """All, oldest first."""
        return rows

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """Those who run, then those who wait, each firm."""
        for sequence in behind(running):
            yield Turn(sequence, budget, True)
        head = None
        while waiting and waiting[0] is not head:
            head = waiting[0]
            yield Turn(head, budget, True)

    def took(self, sequence: Sequence, num_tokens: int) -> None:
        """Nothing to note."""

    def beside_drafts(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Their work, and as long as it pays, for prompts have what they need in any step."""
        return decode_work(decodes, self.windows), inf, False

    def drafted(self, sequence: Sequence, num_drafts: int) -> None:
        """Nothing to note."""

    def drafts_for(self, seconds: float) -> None:
        """Nothing to note."""

    def kept(self, sequence: Sequence, num_drafts: int) -> None:
        """Nothing to note."""

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Youngest first."""
        return running[::-1]

    def weaker(self, newcomer: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Nobody: who runs came first."""
        return []

    def may_take(self, taker: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Anybody, in the policies that reclaim."""
        return True

    def may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        """No: who runs came first."""
        return False
