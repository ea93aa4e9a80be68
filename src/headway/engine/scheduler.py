"""The scheduler: one token budget a step, spent in the order of a policy.

There is no prefill phase and no decode phase. `schedule` spends the budget in this order:

    0  reclaimed slots, when all slots are taken: a user below its share starts in place of a
       sequence of one above it (`engine.reclaim`)
    1  decodes: sequences that lack one sampled token, each with the tokens that a grammar forced
       and its draft tokens (`engine.speculation.step`)
    2  prefills: sequences that lack more, running (chunks of prompts, resumed ones) or waiting; a
       waiting one starts when there are a slot and blocks for it (`engine.starts`)

New requests pass a gate (`engine.batching`) before they wait. The policy (`engine.policy`) decides
the order, and at most how many tokens each sequence gets.

A sequence is preempted (its tokens stay known) for a decode that lacks a block, for a start of
higher rank (`Starts`), for a reclaimed slot, and for a chunk only when nothing else can advance;
docs/preemption.md has the table. `engine.kv_transfers` chooses whether its KV is copied or dropped.
"""

from collections import deque
from collections.abc import Iterable

from headway.core.clock import Clock, SystemClock
from headway.core.plan import Sample, ScheduledSequence, StepPlan, StepResult
from headway.core.request import SequenceUpdate
from headway.engine.batching import BatchGate
from headway.engine.forks import are_forks_due, limit_to_fork_point, start_forks
from headway.engine.kv import KVCache
from headway.engine.kv.listing import export_full, list_full, release_and_list
from headway.engine.kv.open_blocks import limit_to_open_blocks, release_full
from headway.engine.kv.states import whole_tables
from headway.engine.kv_transfers import KVTransfers
from headway.engine.overlap import Overlap, holds_context, is_stalled
from headway.engine.policy import Fcfs, Policy
from headway.engine.policy.policy import list_decodes
from headway.engine.reclaim import Reclaim, lacks_room
from headway.engine.room import RoomFinder
from headway.engine.sequence import FINISHED, RUNNING, WAITING, WAITING_FOR_KV, Sequence
from headway.engine.speculation import NO_DRAFTS, Drafts, DraftTracker, Speculator
from headway.engine.starts import Starts


class Scheduler:
    """The waiting and running sequences: makes plans of them and takes the results."""

    def __init__(
        self,
        kv: KVCache,
        gate: BatchGate,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        transfers: KVTransfers | None = None,
        clock: Clock | None = None,
        speculator: Speculator | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.kv = kv
        self.gate = gate
        self.policy = policy or Fcfs()
        self.transfers = transfers or KVTransfers(kv)
        self.clock = clock or SystemClock()
        self.drafts = DraftTracker(kv, self.policy, speculator, self.clock)
        self.reclaim = Reclaim(kv, self.policy, self.transfers, self.clock, max_num_seqs)
        self.room = RoomFinder(kv, self.transfers)
        self.overlap = overlap or Overlap()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.starts = Starts(self.reclaim, self.room, self.waiting, self.running, self.preempt)
        self.ended_sequences: list[Sequence] = []
        """Sequences that the last step ended."""
        self.num_preemptions = 0
        self._by_id: dict[int, Sequence] = {}
        self._released: list[int] = []
        self._step = 0

    @property
    def has_work(self) -> bool:
        if self._has_batch or self._released or self.overlap.steps:
            return True
        return self.transfers.has_transfers or self.gate.is_open(busy=False)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.gate)

    @property
    def is_full(self) -> bool:
        """Return whether all slots are taken, or a sequence lacked blocks in the last step."""
        return self.starts.is_full

    @property
    def opens_at_s(self) -> float:
        """When an idle scheduler has work without a new request; infinite when never."""
        opens_s, tiers = self.gate.opens_at_s(self._has_batch), self.kv.tiers
        return min(opens_s, tiers.due_at_s) if tiers else opens_s

    @property
    def _has_batch(self) -> bool:
        """Return whether a sequence of a batch is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence before the gate; its rule may admit it to the queue at once."""
        self.gate.add(sequence)
        self._admit()

    def _admit(self) -> None:
        for sequence in self.gate.admit(self._has_batch):
            self.policy.add(sequence)
            self.waiting.append(sequence)

    # ── schedule ────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """Return the plan of the next step; only the blocks of sequences change."""
        with self.overlap.assume(foresees=self.drafts.speculator is None):
            return self._plan()

    def _plan(self) -> StepPlan:
        self._admit()
        plan = StepPlan(self.next_step(), [], [], [])
        may_start = self.starts.begin_step(plan)
        running = self.overlap.select_rows(self.running)
        decodes = self.policy.select_decodes(list_decodes(running), running, self.waiting)
        budget = self._schedule_decodes(plan, decodes)
        if budget > 0:
            self._schedule_prefills(plan, decodes, budget, may_start)
        lacking = self.is_full and lacks_room(self.waiting, self.running)
        self.policy.slot_rate.step(self.clock.now_s(), lacking=lacking)
        self.transfers.begin(plan)
        plan.finished = self.drain_released_ids()
        return plan

    def next_step(self) -> int:
        """Return the number of a new step."""
        self._step += 1
        return self._step - 1

    def drain_released_ids(self) -> list[int]:
        """Return the ids that the next plan tells the runtime to forget."""
        released, self._released = self._released, []
        return released

    def release_ids(self, sequence_ids: list[int]) -> None:
        """Let the next plan tell the runtime to forget these."""
        self._released += sequence_ids

    def _schedule_decodes(self, plan: StepPlan, decodes: list[Sequence]) -> int:
        """Pass 1: a token of each decode, and its draft tokens. Return the remaining budget."""
        budget, num_stalled = self.max_num_batched_tokens, 0
        for sequence, count in self.drafts.plan(decodes, budget):
            while sequence.state == RUNNING and budget > 0:
                if self._add_row(plan, sequence, count, self.drafts.behind(sequence, count)):
                    budget -= len(plan.scheduled[-1].token_ids)
                    break
                victim = self._choose_victim(plan)
                if (
                    victim is sequence and any(map(is_stalled, self.running))
                ) or self.transfers.should_wait_for_copy(sequence, victim, num_stalled):
                    num_stalled += 1
                    break
                self.preempt(victim)
        if self.max_num_batched_tokens - budget > len(plan.scheduled):
            plan.scheduled.sort(key=lambda row: len(row.token_ids) > 1)
        return budget

    def _schedule_prefills(
        self, plan: StepPlan, decodes: list[Sequence], budget: int, may_start: bool
    ) -> None:
        """Pass 2: turns of running and waiting sequences that lack more than a token."""
        self.room.invalidate_promised()
        for sequence, max_tokens, is_blocking in self.policy.prefill_turns(
            self.running, self.waiting, decodes, budget
        ):
            if sequence.state == WAITING and not (may_start and self.starts.start(plan, sequence)):
                may_start = may_start and not is_blocking
            if sequence.state != RUNNING:
                continue
            count = min(len(sequence.tokens) - sequence.computed, max_tokens, budget)
            count = limit_to_fork_point(self.kv, sequence, count)
            if self.kv.choosing is not None:
                count = self.kv.choosing.cut(sequence, count)
            count = limit_to_open_blocks(self.kv, sequence, count)
            while not self._add_row(plan, sequence, count):
                if plan.scheduled or self.transfers.is_busy or self.overlap.steps:
                    return
                victim = self._choose_victim(plan)
                self.preempt(victim)
                if victim is sequence:
                    return
            self.room.invalidate_promised()
            budget -= count
            if budget == 0:
                return

    def _choose_victim(self, plan: StepPlan) -> Sequence:
        """Return the sequence to preempt for this step, of those that are not in the plan."""
        victims = self.policy.victims(self.starts.list_unscheduled(plan))
        return self.reclaim.choose_victim(victims, self.running)

    def _add_row(
        self, plan: StepPlan, sequence: Sequence, count: int, drafts: Drafts = NO_DRAFTS
    ) -> bool:
        """Add a row of `count` tokens to the plan; return False when there is no block for them."""
        start, new_blocks = sequence.computed, self.kv.nothing_new
        end = start + count
        if end + len(drafts.token_ids) > sequence.capacity:
            extension = self.kv.extend(sequence, end + len(drafts.token_ids))
            if extension is None and drafts.token_ids:  # no preemption for draft tokens
                drafts = self.drafts.drop_drafts(sequence)
                extension = self.kv.extend(sequence, end)
            if extension is None:
                return False
            new_blocks, copies = extension
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
        """Introduce a sequence to the runtime."""
        sequence.known_to_runtime = True
        self._by_id[sequence.sequence_id] = sequence
        plan.new.append(sequence.introduction())

    def preempt(self, victim: Sequence, *, may_copy: bool = True) -> None:
        """Move a running sequence back to the head of the queue.

        Its KV is copied to host memory, or is computed again where that is faster.
        """
        self.overlap.revert(victim)
        self.running.remove(victim)
        if may_copy and holds_context(victim, self.kv) and self.transfers.is_cheaper(victim):
            self._release_runtime_state(victim)
            self.transfers.swap_out(victim)
        else:
            victim.num_lost = victim.computed
            self._release(victim, is_sound=may_copy)
        victim.state = WAITING
        self.waiting.appendleft(victim)
        self.room.invalidate()
        self.num_preemptions += 1
        self.transfers.preempted.append((victim.request.request_id, victim.num_generated))

    def _release(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Release its blocks, now or after their copy, and its state in the runtime."""
        if not self.transfers.drop(sequence):
            release_and_list(
                self.kv, sequence, is_sound=is_sound and not self.overlap.copies(sequence)
            )
        self._release_runtime_state(sequence)

    def _release_runtime_state(self, sequence: Sequence) -> None:
        """Release the state of `sequence` in the runtime, the speculator and its grammar."""
        if sequence.grammar is not None:
            sequence.grammar.release()
        self.drafts.forget(sequence)
        self.overlap.drop(sequence)
        if sequence.known_to_runtime:
            sequence.known_to_runtime = False
            del self._by_id[sequence.sequence_id]
            self._released.append(sequence.sequence_id)

    # ── update ──────────────────────────────────────────────────────────────────────────────

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take a step's result: append tokens, stop, release; return the updates."""
        by_id = self._by_id
        for unserved in self.transfers.take(result):
            self.starts.recompute(unserved)
        self._count_computed(plan)
        for prompt in result.prompt_logprobs:
            sequence = by_id.get(prompt.sequence_id)
            if sequence is not None:
                sequence.add_prompt_logprobs(prompt.start, prompt.entries)
        updates, now_s = list[SequenceUpdate](), self.clock.now_s()
        self.ended_sequences = []
        for sample in result.samples:
            sequence = by_id.get(sample.sequence_id)
            if sequence is not None:
                updates.append(self._append_sample(sequence, sample, now_s))
        self.drafts.end_step(result)
        release_full(self.kv, self.running)
        if self.ended_sequences:
            self.running[:] = [s for s in self.running if s.state != FINISHED]
        return updates

    def _count_computed(self, plan: StepPlan) -> None:
        """Count the rows of `plan` as computed, and list blocks that are full."""
        by_id, size = self._by_id, self.kv.block_size
        for row in plan.scheduled:
            sequence = by_id.get(row.sequence_id)
            if sequence is not None:
                sequence.computed = computed = row.start + len(row.token_ids) - row.num_drafts
                if computed >= (sequence.num_listed + 1) * size:
                    list_full(self.kv, sequence)
                if sequence.parcel_id:
                    export_full(self.kv, sequence)
                if sequence.forks and are_forks_due(self.kv, sequence):
                    self._start_forks(sequence)

    def _append_sample(self, sequence: Sequence, sample: Sample, now_s: float) -> SequenceUpdate:
        """Append the sampled tokens to `sequence` and return its update."""
        if sequence.forks:
            self._start_forks(sequence)
        update = sequence.take(sample, now_s, self.drafts.jumps)
        self.drafts.accept(sequence, sample, update)
        if update.finish_reason is not None:
            self.ended_sequences.append(sequence)
            self._finish(sequence)
        return update

    def _start_forks(self, parent: Sequence) -> None:
        """Start the forks of `parent`; those without a free row wait."""
        started, late = start_forks(self.kv, parent, self.max_num_seqs - len(self.running))
        for child in started + late:
            self.policy.add(child)
        self.running += started
        self.waiting.extendleft(reversed(late))

    def by_id(self, sequence_id: int) -> Sequence | None:
        """Return the running sequence with this id, or None when it has ended or was preempted."""
        return self._by_id.get(sequence_id)

    # ── end ────────────────────────────────────────────────────────────────────────────────

    def finish(self, sequence: Sequence) -> None:
        """End `sequence` at any moment: before the gate, waiting or running."""
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
        self.room.on_end(sequence)
        self._release(sequence)
        self.policy.remove(sequence)
        self.reclaim.forget(sequence)

    def check_integrity(self) -> None:
        """Assert that every sequence is in one place and every block has an owner."""
        with self.overlap.assume(foresees=self.drafts.speculator is None):
            sequences = check_places(self.running, self.waiting, self.gate, self._by_id)
            assert len(self.running) <= self.max_num_seqs
            self.transfers.check_integrity(sequences)
            self.reclaim.check_integrity(self.waiting)
            self.kv.check_integrity([*sequences, *self.transfers.release_queue])


def check_places(
    running: list[Sequence],
    waiting: Iterable[Sequence],
    gate: BatchGate,
    by_id: dict[int, Sequence],
) -> list[Sequence]:
    """Assert that every sequence is in one place and sound, and that the runtime knows `by_id`.

    Return all of them, waiting forks included.
    """
    assert all(s.state in (RUNNING, WAITING_FOR_KV) for s in running)
    assert all(s.state == WAITING for s in [*waiting, *gate])
    gate.check_integrity()
    known = [s for s in running if s.known_to_runtime]
    assert {s.sequence_id for s in known} == set(by_id), "the runtime's ids differ"
    queued = [*running, *waiting, *gate]
    sequences = queued + [fork for parent in queued for fork in parent.forks]
    assert len({s.sequence_id for s in sequences}) == len(sequences), "a sequence is twice"
    for sequence in sequences:
        sequence.check_integrity()
        assert sequence.known_to_runtime or not sequence.capacity, (
            "blocks that the runtime does not know"
        )
    return sequences
