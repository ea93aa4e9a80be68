"""Who advances by how much: one token budget a step, spent in the order of a policy.

There is no prefill phase and no decode phase. `schedule` spends the budget in two passes:

    1  running sequences with one token to compute (decodes), or some that a grammar forced with
       it: each always fits
    2  sequences with more to compute, running (chunks of prompts, resumed ones) or waiting; one
       that waits starts when there is a row and room for it (`engine.starts`)

Newcomers come through a gate (`engine.batching`); the waiting ones are in a batch already. Who is
first, and how much it may take, is the policy's to say (`engine.policy`).

When a decode finds no block, a victim is preempted (`engine.preemption`); its tokens stay known. A
chunk that finds none waits for the decodes to finish; only when nothing else can advance does it
preempt.
"""

from collections import deque

from headway.core.clock import Clock, SystemClock
from headway.core.plan import Sample, ScheduledSequence, StepPlan, StepResult
from headway.core.request import SequenceUpdate
from headway.engine.batching import BatchGate
from headway.engine.forks import are_due, before_forks, start_forks
from headway.engine.integrity import check_places
from headway.engine.kv import KVCache
from headway.engine.kv.export import export
from headway.engine.kv.listing import insert, let_go
from headway.engine.kv.open_blocks import fitting, give_back_full
from headway.engine.kv.states import whole_tables
from headway.engine.overlap import Overlap, sees_all, stands_still
from headway.engine.policy import Fcfs, Policy
from headway.engine.policy.policy import list_decodes
from headway.engine.preemption import Preemption
from headway.engine.reclaim import Reclaim, lacks_room
from headway.engine.room import Room
from headway.engine.sequence import FINISHED, RUNNING, WAITING, WAITING_FOR_KV, Sequence
from headway.engine.speculation import NO_DRAFTS, Drafts, Speculator, StepDrafts
from headway.engine.starts import Starts


class Scheduler:
    """Holds the waiting and the running sequences; turns them into plans and takes results."""

    def __init__(
        self,
        kv: KVCache,
        gate: BatchGate,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        clock: Clock | None = None,
        speculator: Speculator | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.kv = kv
        self.gate = gate
        self.policy = policy or Fcfs()
        self.preemption = preemption or Preemption(kv)
        self.clock = clock or SystemClock()
        self.drafts = StepDrafts(kv, self.policy, speculator, self.clock)
        self.reclaim = Reclaim(kv, self.policy, self.preemption, self.clock, max_num_seqs)
        self.room = Room(kv, self.preemption)
        self.overlap = overlap or Overlap()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.starts = Starts(self.reclaim, self.room, self.waiting, self.running, self.preempt)
        self.ended: list[Sequence] = []
        """Whom the last step has ended."""
        self.num_preemptions = 0
        self._by_id: dict[int, Sequence] = {}
        self._released: list[int] = []
        self._step = 0

    @property
    def has_work(self) -> bool:
        if self._is_busy or self._released or self.overlap.steps:
            return True
        return self.preemption.has_transfers or self.gate.is_open(busy=False)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.gate)

    @property
    def is_full(self) -> bool:
        """Whether all rows are taken, or somebody lacked blocks in the last step."""
        return self.starts.is_full

    @property
    def opens_at_s(self) -> float:
        """When time alone gives an idle scheduler work; infinite when only a newcomer can."""
        opens_s, tiers = self.gate.opens_at(self._is_busy), self.kv.tiers
        return min(opens_s, tiers.due_at_s) if tiers else opens_s

    @property
    def _is_busy(self) -> bool:
        """Whether somebody of a batch is still here."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Take a newcomer; it is in the queue at once if the rule of batching lets it."""
        self.gate.add(sequence)
        self._open()

    def _open(self) -> None:
        for sequence in self.gate.let_in(self._is_busy):
            self.policy.add(sequence)
            self.waiting.append(sequence)

    # ── schedule ────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """Form the next step; its blocks are taken, nothing else of the sequences has changed."""
        with self.overlap.assumed(foresees=self.drafts.speculator is None):
            return self._plan()

    def _plan(self) -> StepPlan:
        self._open()
        plan = StepPlan(self.next_step(), [], [], [])
        may_start = self.starts.begin(plan)
        running = self.overlap.share(self.running)
        decodes = self.policy.select_decodes(list_decodes(running), running, self.waiting)
        budget = self._advance_decodes(plan, decodes)
        if budget > 0:
            self._catch_up(plan, decodes, budget, may_start)
        lacking = self.is_full and lacks_room(self.waiting, self.running)
        self.policy.slot_rate.step(self.clock.now_s(), lacking=lacking)
        self.preemption.begin(plan)
        plan.finished = self.take_released()
        return plan

    def next_step(self) -> int:
        """The number of a new step."""
        self._step += 1
        return self._step - 1

    def take_released(self) -> list[int]:
        """The sequences that the runtime has yet to be told to forget."""
        released, self._released = self._released, []
        return released

    def release(self, sequence_ids: list[int]) -> None:
        """Tell the runtime with the next step to forget these."""
        self._released += sequence_ids

    def _advance_decodes(self, plan: StepPlan, decodes: list[Sequence]) -> int:
        """Pass 1: one token of each running sequence that decodes, and its draft tokens.

        Return the budget that remains, in tokens.
        """
        budget, num_stalled = self.max_num_batched_tokens, 0
        for sequence, count in self.drafts.plan(decodes, budget):
            while sequence.state == RUNNING and budget > 0:
                if self._schedule(plan, sequence, count, self.drafts.behind(sequence, count)):
                    budget -= len(plan.scheduled[-1].token_ids)
                    break
                victim = self._victim(plan)
                if (
                    victim is sequence and any(map(stands_still, self.running))
                ) or self.preemption.is_worth_waiting_for(sequence, victim, num_stalled):
                    num_stalled += 1
                    break
                self.preempt(victim)
        if self.max_num_batched_tokens - budget > len(plan.scheduled):
            plan.scheduled.sort(key=lambda row: len(row.token_ids) > 1)
        return budget

    def _catch_up(
        self, plan: StepPlan, decodes: list[Sequence], budget: int, may_start: bool
    ) -> None:
        """Pass 2: running and waiting sequences that lack more than a token, as the policy says."""
        self.room.changed()
        for sequence, max_tokens, is_blocking in self.policy.prefill_turns(
            self.running, self.waiting, decodes, budget
        ):
            if sequence.state == WAITING and not (may_start and self.starts.start(plan, sequence)):
                may_start = may_start and not is_blocking
            if sequence.state != RUNNING:
                continue
            count = min(len(sequence.tokens) - sequence.computed, max_tokens, budget)
            count = before_forks(self.kv, sequence, count)
            if self.kv.choosing is not None:
                count = self.kv.choosing.cut(sequence, count)
            count = fitting(self.kv, sequence, count)
            while not self._schedule(plan, sequence, count):
                if plan.scheduled or self.preemption.is_busy or self.overlap.steps:
                    return
                victim = self._victim(plan)
                self.preempt(victim)
                if victim is sequence:
                    return
            self.room.changed()
            budget -= count
            if budget == 0:
                return

    def _victim(self, plan: StepPlan) -> Sequence:
        """Who gives up its blocks to this step: the policy's first choice that is not in it."""
        return self.reclaim.first(self.policy.victims(self.starts.unplanned(plan)), self.running)

    def _schedule(
        self, plan: StepPlan, sequence: Sequence, count: int, drafts: Drafts = NO_DRAFTS
    ) -> bool:
        """Add `count` tokens of `sequence` to the plan; False when there is no block for them."""
        start, new_blocks = sequence.computed, self.kv.nothing_new
        end = start + count
        if end + len(drafts.token_ids) > sequence.room:
            room = self.kv.extend(sequence, end + len(drafts.token_ids))
            if room is None and drafts.token_ids:  # nobody is preempted for a guess
                drafts = self.drafts.leave_out(sequence)
                room = self.kv.extend(sequence, end)
            if room is None:
                return False
            new_blocks, copies = room
            plan.copies += copies
            if self.kv.choosing is not None:
                plan.shrinks += self.kv.choosing.take()
        if not sequence.known_to_runtime:
            self._introduce(plan, sequence)
            new_blocks = whole_tables(self.kv.states, sequence)
        tokens = sequence.tokens
        chunk, sample = tokens[start:end], end == len(tokens)
        row = ScheduledSequence(sequence.sequence_id, start, chunk, new_blocks, sample)
        if sequence.num_forced:
            row.num_forced = sequence.num_news(start, end)
        plan.scheduled.append(row)
        self.policy.on_scheduled(sequence, count)
        if self.drafts.speculator is not None:
            self.drafts.add_to(row, sequence, drafts)
        return True

    def _introduce(self, plan: StepPlan, sequence: Sequence) -> None:
        """Tell the runtime of a sequence it does not know."""
        sequence.known_to_runtime = True
        self._by_id[sequence.sequence_id] = sequence
        plan.new.append(sequence.introduction())

    def preempt(self, victim: Sequence, *, may_copy: bool = True) -> None:
        """Send a running sequence back to the head of the queue.

        What it has computed is copied to host memory, or where that takes longer, is lost.
        """
        self.overlap.take_back(victim)
        self.running.remove(victim)
        if may_copy and sees_all(victim, self.kv) and self.preemption.is_cheaper(victim):
            self._leave_runtime(victim)
            self.preemption.swap_out(victim)
        else:
            victim.num_lost = victim.computed
            self._forget(victim, is_sound=may_copy)
        victim.state = WAITING
        self.waiting.appendleft(victim)
        self.room.left()
        self.num_preemptions += 1
        self.preemption.preempted.append((victim.request.request_id, victim.num_generated))

    def _forget(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Release the blocks of `sequence`, at once or after their copy, and its state there."""
        if not self.preemption.drop(sequence):
            let_go(self.kv, sequence, is_sound=is_sound and not self.overlap.copies(sequence))
        self._leave_runtime(sequence)

    def _leave_runtime(self, sequence: Sequence) -> None:
        """Release the runtime's state of `sequence`, and its place in a grammar."""
        if sequence.grammar is not None:
            sequence.grammar.release()
        self.drafts.forget(sequence)
        self.overlap.left(sequence)
        if sequence.known_to_runtime:
            sequence.known_to_runtime = False
            del self._by_id[sequence.sequence_id]
            self._released.append(sequence.sequence_id)

    # ── update ──────────────────────────────────────────────────────────────────────────────

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take a step's result: append, stop, release. Aborted sequences are passed over."""
        by_id = self._by_id
        for unserved in self.preemption.take(result):
            self.starts.compute_instead(unserved)
        self._note_computed(plan)
        for prompt in result.prompt_logprobs:
            sequence = by_id.get(prompt.sequence_id)
            if sequence is not None:
                sequence.keep_prompt_logprobs(prompt.start, prompt.entries)
        updates, self.ended, now_s = list[SequenceUpdate](), list[Sequence](), self.clock.now_s()
        for sample in result.samples:
            sequence = by_id.get(sample.sequence_id)
            if sequence is not None:
                updates.append(self._take(sequence, sample, now_s))
        self.drafts.end_step(result)
        give_back_full(self.kv, self.running)
        if self.ended:
            self.running[:] = [s for s in self.running if s.state != FINISHED]
        return updates

    def _note_computed(self, plan: StepPlan) -> None:
        """Count the rows of `plan` as computed, and list blocks that are full."""
        by_id, size = self._by_id, self.kv.block_size
        for row in plan.scheduled:
            sequence = by_id.get(row.sequence_id)
            if sequence is not None:
                sequence.computed = computed = row.start + len(row.token_ids) - row.num_drafts
                if computed >= (sequence.num_remembered + 1) * size:
                    insert(self.kv, sequence)
                if sequence.parcel_id:
                    export(self.kv, sequence)
                if sequence.forks and are_due(self.kv, sequence):
                    self._start_forks(sequence)

    def _take(self, sequence: Sequence, sample: Sample, now_s: float) -> SequenceUpdate:
        """What `sequence` has gained with `sample`."""
        if sequence.forks:
            self._start_forks(sequence)
        update = sequence.take(sample, now_s, self.drafts.jumps)
        self.drafts.accept(sequence, sample, update)
        if update.finish_reason is not None:
            self.ended.append(sequence)
            self._finish(sequence)
        return update

    def _start_forks(self, parent: Sequence) -> None:
        """The siblings of `parent` run; those for which there is no row left wait."""
        started, late = start_forks(self.kv, parent, self.max_num_seqs - len(self.running))
        for child in started + late:
            self.policy.add(child)
        self.running += started
        self.waiting.extendleft(reversed(late))

    def by_id(self, sequence_id: int) -> Sequence | None:
        """The running sequence with this id, or None when it has left."""
        return self._by_id.get(sequence_id)

    # ── leave ───────────────────────────────────────────────────────────────────────────────

    def finish(self, sequence: Sequence) -> None:
        """Take `sequence` out at any moment: waiting, running, or waiting for its parent."""
        if sequence.state in (RUNNING, WAITING_FOR_KV):
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.gate.remove(sequence)
        for fork in reversed(sequence.forks):
            self.policy.add(fork)
            self.waiting.appendleft(fork)
        sequence.forks = []
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = FINISHED
        self.room.ended(sequence)
        self._forget(sequence)
        self.policy.remove(sequence)
        self.reclaim.left(sequence)

    def check_integrity(self) -> None:
        """Assert that every sequence is in one place and every block has its owner."""
        with self.overlap.assumed(foresees=self.drafts.speculator is None):
            everybody = check_places(self.running, self.waiting, self.gate, self._by_id)
            assert len(self.running) <= self.max_num_seqs
            self.preemption.check_integrity(everybody)
            self.reclaim.check_integrity(self.waiting)
            self.kv.check_integrity([*everybody, *self.preemption.guests])
