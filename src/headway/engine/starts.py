"""Who of those that wait starts, and in whose place.

One that waits starts where there are a row and room for it (`engine.room`). Where there are none,
weaker ones make way, and users above their share give slots to those below it (`engine.reclaim`).
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TypingSequence

from headway.core.plan import StepPlan
from headway.engine.kv.forgetting import give_up_restore
from headway.engine.kv.prefix import Hit
from headway.engine.overlap import stands_still
from headway.engine.policy import Policy
from headway.engine.reclaim import Reclaim
from headway.engine.room import Room
from headway.engine.sequence import RUNNING, WAITING, Sequence


class Starts:
    """Moves sequences from `waiting` to `running`; `preempt` moves one back."""

    def __init__(
        self,
        reclaim: Reclaim,
        room: Room,
        waiting: deque[Sequence],
        running: list[Sequence],
        preempt: Callable[[Sequence], None],
    ) -> None:
        self.kv, self.preemption, self.clock = reclaim.kv, reclaim.preemption, reclaim.clock
        self.reclaim, self.room = reclaim, room
        self.waiting, self.running = waiting, running
        self.preempt = preempt
        self.was_refused = False
        """Whether somebody lacked a row or blocks in the last step."""

    @property
    def policy(self) -> Policy:
        """Who goes before whom."""
        return self.reclaim.policy

    @property
    def is_full(self) -> bool:
        """Whether all rows are taken, or somebody lacked blocks in the last step."""
        return self.was_refused or len(self.running) >= self.reclaim.max_num_seqs

    def begin(self, plan: StepPlan) -> bool:
        """Begin a step with those who reclaim a slot.

        False where one of them waits for a copy to end: nobody else may start in this step.
        """
        may_start = self._reclaim(plan)
        self.was_refused = not may_start
        return may_start

    def _reclaim(self, plan: StepPlan) -> bool:
        """Let users below their share start in the place of those above it; as `begin`."""
        self.room.changed()
        if not self.waiting or not self.is_full:
            return True
        for sequence in self.reclaim.claimants(self.running, self.waiting):
            if self._fitting(sequence, self.preemption.leaving()) is None:
                promised = self.room.promised(self.running)
                victims = self.reclaim.victims(sequence, self.running, promised)
                for victim in victims:
                    self.preempt(victim)
                    self.reclaim.given(victim)
                if not victims:
                    continue
            if not self.start(plan, sequence, lasts=False):
                return False
        return True

    def start(self, plan: StepPlan, sequence: Sequence, *, lasts: bool = True) -> bool:
        """Let a waiting sequence run if there is room for it (`engine.room`), where it `lasts`
        until the running ones end.

        Weaker ones make way where that suffices. One whose KV is in host memory runs when that is
        back.
        """
        if self.preemption.is_flying(sequence):
            return False
        hit = self._lasting(plan, sequence) if lasts else self._fitting(sequence)
        hit = hit or self._make_way(plan, sequence)
        if hit is None:
            self.was_refused = True
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.policy.slot_rate.began(self.clock.now_s())
        self.reclaim.came_back(sequence, hit.num_tokens)
        self.room.began(sequence, hit)
        if sequence.host_tables:
            self.preemption.swap_in(sequence)
        else:
            self.kv.reuse(sequence, hit)
            sequence.state = RUNNING
            if hit.reads:
                self.preemption.restore(sequence, hit)
            self.preemption.count_lost(sequence, hit.num_tokens)
        return True

    def _make_way(self, plan: StepPlan, sequence: Sequence) -> Hit | None:
        """Preempt weaker ones where that suffices; what `sequence` begins with, None: not now."""
        weaker = self.policy.preemptible_for(sequence, self.unplanned(plan))
        if not weaker:
            return None
        hit = None if sequence.host_tables else self.kv.match_prefix(sequence, partly=False)
        needed = self.kv.still_needed(sequence, hit)
        leaving = self.preemption.leaving()
        held = [n + sum(len(s.block_tables[g]) for s in weaker) for g, n in enumerate(leaving)]
        if not self.kv.has_room([max(n - h, 0) for n, h in zip(needed, held, strict=True)]):
            return None
        for victim in weaker:
            if self._fitting(sequence, self.preemption.leaving()) is not None:
                return None
            self.preempt(victim)
            hit = self._fitting(sequence)
            if hit is not None:
                return hit
        return None

    def _lasting(self, plan: StepPlan, sequence: Sequence) -> Hit | None:
        """As `_fitting`, where `sequence` is expected to last."""
        if len(self.running) >= self.reclaim.max_num_seqs:
            return None
        return self.room.lasting(sequence, self.running, plan.step, self.policy.preemptible_for)

    def _fitting(self, sequence: Sequence, leaving: TypingSequence[int] = ()) -> Hit | None:
        """What `sequence` may begin with, or None where there is no row or no room.

        So many blocks that are `leaving` count as free.
        """
        if len(self.running) >= self.reclaim.max_num_seqs:
            return None
        return self.room.fitting(sequence, self.running, leaving)

    def compute_instead(self, sequence: Sequence) -> None:
        """What `sequence` waited for did not come: it is the first of the queue again."""
        self.running.remove(sequence)
        give_up_restore(self.kv, sequence)
        sequence.state = WAITING
        self.waiting.appendleft(sequence)

    def unplanned(self, plan: StepPlan) -> list[Sequence]:
        """The running sequences that the step does not advance so far, and whose KV is there."""
        planned = {row.sequence_id for row in plan.scheduled}
        here = [s for s in self.running if s.state == RUNNING and not stands_still(s)]
        return [s for s in here if s.sequence_id not in planned]
