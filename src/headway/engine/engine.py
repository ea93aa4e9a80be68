"""The engine: requests in, steps, updates out. The step is a sentence.

    plan = scheduler.schedule()     # who advances by how much
    result = run(executor, plan)    # submit, sample, collect
    scheduler.update(plan, result)  # append, stop, release

Given an executor and settings it runs in whatever process calls `step`: the engine's own, a
caller's (`headway.LLM`), a test's, a simulation's. It promises each request exactly one terminal
update per sequence, whatever happens in a step.
"""

import logging
from collections.abc import Sequence as TypingSequence
from functools import partial

from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError
from headway.core.plan import Advance, Executor, StepPlan, StepResult, run
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.core.resolve import Settings
from headway.engine.batching import Lobby
from headway.engine.halves import Halves, new_sequence
from headway.engine.kv import KVCache
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import Sequence
from headway.telemetry.records import StepRecord, count_work

log = logging.getLogger(__name__)

GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
Told = TypingSequence[list[int] | None]
WARM_UP_TOKENS, WARM_UP_REQUEST_ID = 32, 0


class Engine:
    """Sequences of all running requests, a scheduler over them, and an executor below."""

    def __init__(
        self,
        executor: Executor,
        settings: Settings,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        clock: Clock | None = None,
    ) -> None:
        self.executor = executor
        self.settings = settings
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.clock = clock or SystemClock()
        self.kv = KVCache(
            settings.num_blocks,
            settings.block_size,
            settings.windows,
            settings.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            self.kv,
            Lobby(settings.batching, settings.max_num_seqs, settings.batch_window_s, self.clock),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        self._ended_s: float | None = None
        self._was_idle = False
        self._requests: dict[int, list[Sequence]] = {}
        self._next_sequence_id = 0
        self._untold = False

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, if only to tell that a request waits or left."""
        return self.scheduler.has_work or self._untold

    @property
    def wakes_at_s(self) -> float:
        """When an engine without work will have some by itself; infinite when never."""
        return self.scheduler.opens_at_s

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: Request, told: Told = ()) -> None:
        """Queue a request; raises RequestError when it can never run here.

        `told` resumes one that another engine had begun: by index the tokens its sequences have
        had, None for a sequence that is over. They go on as if they had been preempted.
        """
        self._check(request)
        sampling = request.sampling
        limit = self.settings.max_model_len
        if sampling.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + sampling.max_tokens)
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self.eos_token_ids
        sequences = []
        for index in range(sampling.n):
            known = told[index] if told else []
            if known is None:
                continue
            sequence = Sequence(
                self._next_sequence_id,
                request,
                index,
                num_groups=len(self.kv.pools),
                stop_ids=stop_ids,
                max_len=limit,
                seed=self._seed(request),
            )
            sequence.resume(known)
            sequences.append(sequence)
            self._next_sequence_id += 1
        if not sequences:
            return
        self._requests[request.request_id] = sequences
        self._enqueue(sequences)

    def _enqueue(self, sequences: list[Sequence]) -> None:
        """Hand the sequences of one request to the scheduler, the first ahead of its siblings.

        Those that are resumed have prompts of their own: each goes by itself.
        """
        fresh = [sequence for sequence in sequences if not sequence.num_generated]
        if fresh:
            fresh[0].forks = fresh[1:]
        for sequence in sequences:
            if sequence.num_generated or sequence is fresh[0]:
                self.scheduler.add(sequence)
        self._untold = self._untold or not self.scheduler.has_work

    def flush(self) -> None:
        """No more requests will come: let those that wait for a batch to fill start."""
        self.scheduler.lobby.flush()

    def _check(self, request: Request) -> None:
        """The engine's own check, behind the server's: nothing here may kill a step."""
        length = len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise RequestError("This request id is in use.", param="request_id")
        if length == 0:
            raise RequestError("The prompt is empty.", param="prompt", code="empty_array")
        if length >= self.settings.max_model_len:
            raise RequestError(
                f"The prompt has {length} tokens; the context is {self.settings.max_model_len} "
                "with the answer.",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self.vocab_size:
            raise RequestError(
                f"The prompt holds a token id outside 0 … {self.vocab_size - 1}.",
                param="prompt",
                code="invalid_value",
            )
        sampling = request.sampling
        sampling.check_vocabulary(self.vocab_size)
        ends = self.eos_token_ids | set(sampling.stop_token_ids)
        if sampling.min_tokens and ends.issuperset(
            sampling.allowed_token_ids or range(self.vocab_size)
        ):
            raise RequestError(
                "Every token that is allowed is an end token, which min_tokens forbids.",
                param="min_tokens",
                code="invalid_value",
            )

    def _seed(self, request: Request) -> int:
        """The request's own seed, or one that no other request of this engine has."""
        if request.sampling.seed is not None:
            return request.sampling.seed % 2**64
        return (self.settings.seed + (request.request_id + 1) * GOLDEN_RATIO_64) % 2**64

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Drop a request (or one of its sequences) at any moment; its blocks are free at once.

        No update follows. An unknown id is fine: it may have finished a moment ago.
        """
        for sequence in list(self._requests.get(request_id, ())):
            if index is None or sequence.index == index:
                self._drop_fork(sequence)
                self.scheduler.finish(sequence)
                self._leave(sequence)
                self._untold = True

    def _drop_fork(self, sequence: Sequence) -> None:
        """A sequence that waits for its parent's prompt is in no queue but the parent's."""
        for sibling in self._requests[sequence.request.request_id]:
            if sequence in sibling.forks:
                sibling.forks.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def step(self) -> tuple[list[SequenceUpdate], StepRecord]:
        """Run one step; returns what each sequence gained and the record of the step."""
        started_s = self.clock.now_s()
        self._untold = False
        plan = self.scheduler.schedule()
        planned_s = self.clock.now_s()
        queried, cached = self._first_scheduled(plan, planned_s) if plan.new else (0, 0)
        try:
            result = run(self.executor, plan)
        except Exception:
            result = self._run_in_halves(plan)
        collected_s = self.clock.now_s()
        updates = self._fail(result) + self.scheduler.update(plan, result)
        if result.failed and not result.samples:
            self._test_runtime()
        for update in updates:
            if update.finish_reason is not None:
                self._leave_by(update)
        record = self._record(plan, result, started_s)
        record.num_queried_tokens, record.num_cached_tokens = queried, cached
        record.schedule_s = planned_s - started_s
        record.execute_s = collected_s - planned_s
        self._ended_s, self._was_idle = self.clock.now_s(), not self.has_work
        record.update_s = self._ended_s - collected_s
        return updates, record

    def _run_in_halves(self, plan: StepPlan) -> StepResult:
        """Called while the step's exception is handled: find the rows that raise by themselves.

        A row that copies a block is put back into the queue instead, for what it copied from may
        be another's by now; it comes again without a copy.
        """
        log.exception("step %d failed; its %d rows run in halves", plan.step, len(plan.advanced))
        copying = {copy.sequence_id for copy in plan.copies}
        for sequence in [s for s in self.scheduler.running if s.sequence_id in copying]:
            self.scheduler.preempt(sequence)
        rows = [row for row in plan.advanced if row.sequence_id not in copying]
        stale = [*plan.finished, *self.scheduler.take_released()]
        halves = Halves(
            run=partial(run, self.executor),
            next_step=self.scheduler.next_step,
            find=self.scheduler.by_id,
            result=StepResult(plan.step, []),
            stale=[*stale, *(row.sequence_id for row in rows)],
        )
        halves.search(rows)
        if not halves.num_attempts:
            self.scheduler.release(stale)
        order = {row.sequence_id: number for number, row in enumerate(plan.advanced)}
        halves.result.samples.sort(key=lambda sample: order[sample.sequence_id])
        return halves.result

    def _test_runtime(self) -> None:
        """Nobody got a token: compute one of nobody's, to know the runtime from its guests.

        Raises what the runtime raises: then this engine is at its end, and its process with it.
        """
        sampling = SamplingParams(temperature=0, max_tokens=1)
        nobody = Sequence(
            self._next_sequence_id,
            Request(WARM_UP_REQUEST_ID, [0], sampling),
            0,
            num_groups=len(self.kv.pools),
            stop_ids=frozenset(),
            max_len=2,
            seed=0,
        )
        self._next_sequence_id += 1
        room = self.kv.extend(nobody, 1)
        if room is None:
            return
        scheduler = self.scheduler
        row = Advance(nobody.sequence_id, 0, [0], room[0], True)
        plan = StepPlan(
            scheduler.next_step(), [new_sequence(nobody)], [row], scheduler.take_released()
        )
        try:
            run(self.executor, plan)
        finally:
            self.kv.release(nobody)
            scheduler.release([nobody.sequence_id])

    def _first_scheduled(self, plan: StepPlan, now_s: float) -> tuple[int, int]:
        """(prompt tokens scheduled for the first time, those of them that were cached).

        A sibling's prompt is its parent's and counts once; a resumed sequence is not new.
        """
        computed = {row.sequence_id: row.start for row in plan.advanced}
        queried = cached = 0
        for new in plan.new:
            sequence = self.scheduler.by_id(new.sequence_id)
            if sequence is None or sequence.first_scheduled_s is not None:
                continue
            sequence.first_scheduled_s = now_s
            if sequence.index == 0:
                sequence.num_cached = computed[new.sequence_id]
                queried += sequence.num_prompt
                cached += sequence.num_cached
        return queried, cached

    def _leave_by(self, update: SequenceUpdate) -> None:
        for sequence in self._requests[update.request_id]:
            if sequence.index == update.index:
                self._leave(sequence)
                return

    def _fail(self, result: StepResult) -> list[SequenceUpdate]:
        """End the sequences the runtime could not advance, each with an error update."""
        updates = []
        for sequence_id, reason in result.failed.items():
            sequence = self.scheduler.by_id(sequence_id)
            if sequence is not None:
                log.error("request %d failed: %s", sequence.request.request_id, reason)
                self.scheduler.finish(sequence)
                updates.append(
                    SequenceUpdate(sequence.request.request_id, sequence.index, [], "error")
                )
        return updates

    def _record(self, plan: StepPlan, result: StepResult, started_s: float) -> StepRecord:
        scheduler, used = self.scheduler, [pool.num_used for pool in self.kv.pools]
        record = StepRecord(
            step=plan.step,
            started_s=started_s,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_tokens=0,
            num_sampled=sum([row.sample for row in plan.advanced]),
            kv_blocks_used=sum(used),
            kv_usage=self.kv.usage,
            num_preemptions=scheduler.num_preemptions,
            group_blocks_used=used,
        )
        count_work(record, plan.advanced, self.kv.windows)
        timings = result.timings
        record.prepare_s, record.forward_s = timings.prepare_s, timings.forward_s
        record.sample_s = timings.sample_s
        record.experts_read = result.experts_read
        if self._ended_s is not None:
            since_s = started_s - self._ended_s
            record.gap_s, record.idle_s = (0.0, since_s) if self._was_idle else (since_s, 0.0)
        if record.num_prefill_tokens:
            record.prefilling = self._prefilling(plan)
        if scheduler.preempted:
            record.preempted, scheduler.preempted = scheduler.preempted, []
        return record

    def _prefilling(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """(request id, index, tokens computed) of the rows that catch up with their prompts."""
        found = []
        for row in plan.advanced:
            sequence = self.scheduler.by_id(row.sequence_id)
            if sequence is not None and len(row.token_ids) > row.num_drafts + 1:
                end = row.start + len(row.token_ids)
                found.append((sequence.request.request_id, sequence.index, end))
        return found

    def warm_up(self) -> None:
        """Run one short request, so that the first user does not pay for first allocations."""
        length = min(WARM_UP_TOKENS, self.settings.max_model_len - 1)
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        self.add(Request(WARM_UP_REQUEST_ID, [0] * max(length - 1, 1), sampling))
        self.flush()
        while self.has_work:
            self.step()

    def check_integrity(self) -> None:
        """Assert every invariant of the engine; when idle, also that nothing is held."""
        self.scheduler.check_integrity()
        if not self._requests:
            assert self.kv.num_used == 0, f"{self.kv.num_used} blocks leaked"
            assert not self.scheduler.running and not self.scheduler.num_waiting
