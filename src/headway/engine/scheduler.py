"""Who advances by how much: one token budget a step, first come first served.

There is no prefill phase and no decode phase. `schedule` spends the budget in three passes:

    1  running sequences with one token to compute (decodes), oldest first; each always fits
    2  running sequences with more to compute (chunks of prompts, resumed sequences)
    3  waiting sequences, while there are rows, tokens and blocks for the whole of them

Newcomers come through a lobby (`engine.batching`); the waiting ones are in a batch already.

When a decode finds no block, the youngest running sequence is preempted: its blocks go back, its
tokens stay known, and it computes them again from the head of the queue. A chunk that finds none
waits for the decodes to finish; only when nothing else can advance does it preempt.
"""

from collections import deque

from headway.core.plan import Advance, StepPlan, StepResult
from headway.core.request import SequenceUpdate, TokenLogprobs
from headway.engine.batching import Lobby
from headway.engine.kv import KVCache
from headway.engine.sequence import FINISHED, RUNNING, WAITING, Sequence


class Scheduler:
    """Holds the waiting and the running sequences; turns them into plans and takes results."""

    def __init__(
        self, kv: KVCache, lobby: Lobby, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.kv = kv
        self.lobby = lobby
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.preempted: list[int] = []
        """Ids of the requests preempted since the engine last took note."""
        self._by_id: dict[int, Sequence] = {}
        self._released: list[int] = []
        self._step = 0

    @property
    def has_work(self) -> bool:
        return self._is_busy or bool(self._released) or self.lobby.is_open(busy=False)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.lobby)

    @property
    def opens_at_s(self) -> float:
        """When time alone gives an idle scheduler work; infinite when only a newcomer can."""
        return self.lobby.opens_at(self._is_busy)

    @property
    def _is_busy(self) -> bool:
        """Whether somebody of a batch is still here."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Take a newcomer; it is in the queue at once if the rule of batching lets it."""
        self.lobby.add(sequence)
        self._open()

    def _open(self) -> None:
        self.waiting.extend(self.lobby.let_in(self._is_busy))

    # ── schedule ────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """Form the next step; its blocks are taken, nothing else of the sequences has changed."""
        self._open()
        plan = StepPlan(self.next_step(), [], [], [])
        budget = self._advance_decodes(plan, self.max_num_batched_tokens)
        budget, stuck = self._advance_chunks(plan, budget)
        if not stuck:
            self._admit(plan, budget)
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

    def _advance_decodes(self, plan: StepPlan, budget: int) -> int:
        """Pass 1; returns the budget that is left."""
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            if len(sequence.tokens) - sequence.computed == 1:
                while not self._advance(plan, sequence, 1):
                    if self._preempt_youngest() is sequence:
                        return budget
                budget -= 1
            position += 1
        return budget

    def _advance_chunks(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Pass 2; returns the budget that is left and whether a chunk found no block."""
        for sequence in list(self.running):
            missing = len(sequence.tokens) - sequence.computed
            if missing <= 1 or sequence.state != RUNNING:
                continue
            count = min(missing, budget)
            if count == 0:
                return 0, False
            while not self._advance(plan, sequence, count):
                if plan.advanced or self._preempt_youngest() is sequence:
                    return budget, True
            budget -= count
        return budget, False

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Pass 3: start waiting sequences in order, each with room for all its known tokens."""
        if not self.waiting:
            return
        promised = [0] * len(self.kv.pools)
        for sequence in self.running:
            promised = added(promised, self.kv.still_needed(sequence))
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self.kv.has_room(added(promised, self.kv.still_needed(sequence))):
                return
            self.waiting.popleft()
            sequence.state = RUNNING
            self.running.append(sequence)
            count = min(sequence.num_known, budget)
            advanced = self._advance(plan, sequence, count)
            assert advanced, "has_room and extend disagree"
            promised = added(promised, self.kv.still_needed(sequence))
            budget -= count

    def _advance(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Add `count` tokens of `sequence` to the plan; False when there is no block for them."""
        start = sequence.computed
        end = start + count
        room = self.kv.extend(sequence, end)
        if room is None:
            return False
        new_blocks, copies = room
        if copies:
            plan.copies.extend(copies)
        if not sequence.known_to_runtime:
            self._introduce(plan, sequence)
            new_blocks = [list(table) for table in sequence.block_tables]
        tokens = sequence.tokens
        chunk = tokens[-1:] if count == 1 and end == len(tokens) else tokens[start:end]
        plan.advanced.append(
            Advance(sequence.sequence_id, start, chunk, new_blocks, end == len(tokens))
        )
        return True

    def _introduce(self, plan: StepPlan, sequence: Sequence) -> None:
        """Tell the runtime of a sequence it does not know."""
        sequence.known_to_runtime = True
        self._by_id[sequence.sequence_id] = sequence
        plan.new.append(sequence.introduction())

    def _preempt_youngest(self) -> Sequence:
        """Send the youngest running sequence back to the head of the queue."""
        victim = self.running[-1]
        self.preempt(victim)
        return victim

    def preempt(self, victim: Sequence) -> None:
        """Send a running sequence back to the head of the queue: nothing of it is computed."""
        self.running.remove(victim)
        self._forget(victim)
        victim.state = WAITING
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        self.preempted.append(victim.request.request_id)

    def _forget(self, sequence: Sequence) -> None:
        """Release the blocks of `sequence` here and its mirror in the runtime."""
        self.kv.release(sequence)
        if sequence.grammar is not None:
            sequence.grammar.release()
        if sequence.known_to_runtime:
            sequence.known_to_runtime = False
            del self._by_id[sequence.sequence_id]
            self._released.append(sequence.sequence_id)

    # ── update ──────────────────────────────────────────────────────────────────────────────

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take a step's result: append, stop, release. Aborted sequences are passed over."""
        by_id = self._by_id
        for row in plan.advanced:
            sequence = by_id.get(row.sequence_id)
            if sequence is not None:
                sequence.computed = row.start + len(row.token_ids)
        for prompt in result.prompt_logprobs:
            sequence = by_id.get(prompt.sequence_id)
            if sequence is not None:
                keep_prompt_logprobs(sequence, prompt.start, prompt.entries)
        updates = []
        finished = False
        for sample in result.samples:
            sequence = by_id.get(sample.sequence_id)
            if sequence is not None:
                if sequence.forks:
                    self._start_forks(sequence)
                update = self._append(sequence, sample.token_ids, sample.logprobs)
                finished |= update.finish_reason is not None
                updates.append(update)
        if finished:
            self.running = [s for s in self.running if s.state == RUNNING]
        return updates

    def _append(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
    ) -> SequenceUpdate:
        """Append what was sampled up to the first token that ends the sequence."""
        request = sequence.request
        update = SequenceUpdate(request.request_id, sequence.index, token_ids, logprobs=logprobs)
        if sequence.num_generated == 0:
            update.first_scheduled_s = sequence.first_scheduled_s
            update.num_cached_tokens = sequence.num_cached
            if sequence.wants_prompt_logprobs:
                update.prompt_logprobs = sequence.prompt_logprobs
        for count, token_id in enumerate(token_ids, 1):
            reason = sequence.append(token_id)
            if reason is not None:
                update.token_ids = token_ids[:count]
                update.logprobs = logprobs[:count] if logprobs else None
                update.finish_reason = reason
                hidden = reason == "stop" and sequence.hides(token_id)
                update.stop_token_id = token_id if hidden else None
                if sequence.grammar is not None:
                    update.incomplete = not sequence.grammar.is_satisfied
                self._finish(sequence)
                break
        return update

    def _start_forks(self, parent: Sequence) -> None:
        """The prompt of `parent` is computed: its siblings share it, all but the last token.

        Each computes that token again, as a decode row, for a sample of its own. Siblings for
        which there is no row left queue up and compute the prompt themselves.
        """
        forks, parent.forks = parent.forks, []
        shared = parent.num_prompt - 1
        late = []
        for child in forks:
            if len(self.running) < self.max_num_seqs and parent.computed >= parent.num_prompt:
                self.kv.fork(parent, child, shared)
                child.state = RUNNING
                self.running.append(child)
            else:
                late.append(child)
        self.waiting.extendleft(reversed(late))

    def by_id(self, sequence_id: int) -> Sequence | None:
        """The running sequence with this id, or None when it has left."""
        return self._by_id.get(sequence_id)

    # ── leave ───────────────────────────────────────────────────────────────────────────────

    def finish(self, sequence: Sequence) -> None:
        """Take `sequence` out at any moment: waiting, running, or waiting for its parent."""
        if sequence.state == RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.lobby.remove(sequence)
        if sequence.forks:
            self.waiting.extendleft(reversed(sequence.forks))
            sequence.forks = []
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = FINISHED
        self._forget(sequence)

    def check_integrity(self) -> None:
        """Assert that every sequence is in one place and every block has its owner."""
        assert all(s.state == RUNNING for s in self.running)
        assert all(s.state == WAITING for s in [*self.waiting, *self.lobby])
        self.lobby.check_integrity()
        known = [s for s in self.running if s.known_to_runtime]
        assert {s.sequence_id for s in known} == set(self._by_id), "the mirror's ids differ"
        assert len(self.running) <= self.max_num_seqs
        queued = [*self.running, *self.waiting, *self.lobby]
        everybody = queued + [fork for parent in queued for fork in parent.forks]
        assert len({s.sequence_id for s in everybody}) == len(everybody), "a sequence is twice"
        for sequence in everybody:
            sequence.check_integrity()
        self.kv.check_integrity(everybody)


def added(some: list[int], more: list[int]) -> list[int]:
    """Sum by group."""
    return [a + b for a, b in zip(some, more, strict=True)]


def keep_prompt_logprobs(sequence: Sequence, start: int, entries: list[TokenLogprobs]) -> None:
    """Append the entries that are new; a preempted prompt is computed twice, told once."""
    have = len(sequence.prompt_logprobs)
    sequence.prompt_logprobs.extend(entries[max(have - start, 0) :])
