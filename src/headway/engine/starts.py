"""Starts of waiting sequences.

A waiting sequence starts when there is a slot and room for it (`engine.room`). Where there is none,
sequences that the policy holds preemptible for it are preempted, and users above their share give
slots to those below it (`engine.reclaim`).
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TypingSequence

from headway.core.plan import StepPlan
from headway.engine.kv.forgetting import give_up_restore
from headway.engine.kv.prefix import Hit
from headway.engine.overlap import is_stalled
from headway.engine.policy import Policy
from headway.engine.reclaim import Reclaim
from headway.engine.room import RoomFinder
from headway.engine.sequence import RUNNING, WAITING, Sequence


class Starts:
    """Moves sequences from `waiting` to `running`; the callback `preempt` moves one back."""

    def __init__(
        self,
        reclaim: Reclaim,
        room: RoomFinder,
        waiting: deque[Sequence],
        running: list[Sequence],
        preempt: Callable[[Sequence], None],
    ) -> None:
        self.kv, self.transfers, self.clock = reclaim.kv, reclaim.transfers, reclaim.clock
        self.reclaim, self.room = reclaim, room
        self.waiting, self.running = waiting, running
        self.preempt = preempt
        self.has_refused = False
        """Whether a waiting sequence lacked a slot or blocks in the last step."""

    @property
    def policy(self) -> Policy:
        """Return the policy, which orders sequences."""
        return self.reclaim.policy

    @property
    def is_full(self) -> bool:
        """Return whether all slots are taken, or a sequence lacked blocks in the last step."""
        return self.has_refused or len(self.running) >= self.reclaim.max_num_seqs

    def begin_step(self, plan: StepPlan) -> bool:
        """Begin a step: start sequences that reclaim a slot; return whether others may start too.

        They may not while one of them waits for a copy to end.
        """
        may_start = self._start_claimants(plan)
        self.has_refused = not may_start
        return may_start

    def _start_claimants(self, plan: StepPlan) -> bool:
        """Start sequences of users below their share in place of others; return as `begin_step`."""
        self.room.invalidate_promised()
        if not self.waiting or not self.is_full:
            return True
        for sequence in self.reclaim.claimants(self.running, self.waiting):
            if self._find_room(sequence, self.transfers.leaving()) is None:
                promised = self.room.promised_blocks(self.running)
                victims = self.reclaim.victims(sequence, self.running, promised)
                for victim in victims:
                    self.preempt(victim)
                    self.reclaim.count_reclaimed(victim)
                if not victims:
                    continue
            if not self.start(plan, sequence, lasts=False):
                return False
        return True

    def start(self, plan: StepPlan, sequence: Sequence, *, lasts: bool = True) -> bool:
        """Start a waiting sequence if there is room for it (`engine.room`); return whether it did.

        With `lasts` the room has to last until running answers end. Sequences that are preemptible
        for it are preempted where that suffices. A sequence whose KV is in host memory runs when
        the copy has ended.
        """
        if self.transfers.is_in_transfer(sequence):
            return False
        hit = self._find_lasting_room(plan, sequence) if lasts else self._find_room(sequence)
        hit = hit or self._preempt_for(plan, sequence)
        if hit is None:
            self.has_refused = True
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.policy.slot_rate.record_start(self.clock.now_s())
        self.reclaim.charge_resumed(sequence, hit.num_tokens)
        self.room.on_start(sequence, hit)
        if sequence.host_tables:
            self.transfers.swap_in(sequence)
        else:
            self.kv.reuse(sequence, hit)
            sequence.state = RUNNING
            if hit.reads:
                self.transfers.restore(sequence, hit)
            self.transfers.count_lost(sequence, hit.num_tokens)
        return True

    def _preempt_for(self, plan: StepPlan, sequence: Sequence) -> Hit | None:
        """Preempt sequences for this one where that suffices; return its prefix, or None."""
        preemptible = self.policy.preemptible_for(sequence, self.list_unscheduled(plan))
        if not preemptible:
            return None
        hit = None if sequence.host_tables else self.kv.match_prefix(sequence, partly=False)
        needed = self.kv.still_needed(sequence, hit)
        leaving = self.transfers.leaving()
        held = [n + sum(len(s.block_tables[g]) for s in preemptible) for g, n in enumerate(leaving)]
        if not self.kv.has_room([max(n - h, 0) for n, h in zip(needed, held, strict=True)]):
            return None
        for victim in preemptible:
            if self._find_room(sequence, self.transfers.leaving()) is not None:
                return None
            self.preempt(victim)
            hit = self._find_room(sequence)
            if hit is not None:
                return hit
        return None

    def _find_lasting_room(self, plan: StepPlan, sequence: Sequence) -> Hit | None:
        """Return as `_find_room`, where `sequence` is predicted to last."""
        if len(self.running) >= self.reclaim.max_num_seqs:
            return None
        return self.room.find_lasting_room(
            sequence, self.running, plan.step, self.policy.preemptible_for
        )

    def _find_room(self, sequence: Sequence, leaving: TypingSequence[int] = ()) -> Hit | None:
        """Return the prefix that `sequence` starts behind, or None without a slot or room.

        `leaving` blocks by group count as free.
        """
        if len(self.running) >= self.reclaim.max_num_seqs:
            return None
        return self.room.find_room(sequence, self.running, leaving)

    def recompute(self, sequence: Sequence) -> None:
        """Put a sequence whose KV could not be restored back to the head of the queue."""
        self.running.remove(sequence)
        give_up_restore(self.kv, sequence)
        sequence.state = WAITING
        self.waiting.appendleft(sequence)

    def list_unscheduled(self, plan: StepPlan) -> list[Sequence]:
        """Return the running sequences with KV in place that have no row in the plan yet."""
        planned = {row.sequence_id for row in plan.scheduled}
        here = [s for s in self.running if s.state == RUNNING and not is_stalled(s)]
        return [s for s in here if s.sequence_id not in planned]
