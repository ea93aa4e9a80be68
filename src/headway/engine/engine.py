"""The engine: takes requests, runs steps, returns updates. The step is a sentence.

    plan = scheduler.schedule()     # which sequences advance, and by how many tokens
    result = run(plan)              # submit, sample, collect; grammar masks are computed meanwhile
    scheduler.update(plan, result)  # append, stop, release

With an executor that holds several steps, the next step is scheduled and submitted before this one
is collected (`engine.overlap`).

The engine runs in the process that calls `step`: the engine's own, a caller's (`headway.LLM`), a
test's, a simulation's. Each sequence of a request gets exactly one terminal update, whatever
happens in a step.
"""

import logging
from collections.abc import Sequence as TypingSequence

from headway.config.resolve import Settings
from headway.core.errors import ExecutorLostError, RequestError, ShedError
from headway.core.grammar import Grammar
from headway.core.plan import (
    Executor,
    GrammarMasks,
    OverlappingExecutor,
    StepPlan,
    StepResult,
)
from headway.core.records import StepRecord
from headway.core.request import Request, SequenceUpdate
from headway.engine.admission import check, longest, scaled_len
from headway.engine.bisect_step import abandon, bisect_step, check_runtime
from headway.engine.grammar.grammars import Grammars, begin_masks
from headway.engine.grammar.masks import StepMasks
from headway.engine.grammar.state import Compiled
from headway.engine.kv.forgetting import forget_owner
from headway.engine.overlap import StepInFlight, is_nothing
from headway.engine.recording import StepRecorder, count_first_scheduled
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import FINISHED, Sequence

log = logging.getLogger(__name__)

GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
ResumedTokens = TypingSequence[list[int] | None]


class Engine:
    """Sequences of all running requests, the scheduler, and the executor.

    `engine.build.build_engine` makes one from settings.
    """

    def __init__(
        self,
        executor: Executor,
        settings: Settings,
        scheduler: Scheduler,
        recorder: StepRecorder,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars | None = None,
    ) -> None:
        self.executor, self.settings = executor, settings
        self.scheduler, self.recorder, self.grammars = scheduler, recorder, grammars
        self.kv, self.clock, self.cost = scheduler.kv, scheduler.clock, recorder.cost
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._requests: dict[int, list[Sequence]] = {}
        self._next_sequence_id = 0
        self._must_report = self._flushed = False
        self._refusals: list[tuple[int, RequestError]] = []

    def sequences_of(self, request_id: int) -> list[Sequence]:
        """Return the sequences of a request that have not ended."""
        return list(self._requests.get(request_id, ()))

    @property
    def has_work(self) -> bool:
        """Return whether a step has work, if only to report that a request waits or left."""
        return self.scheduler.has_work or self._must_report or self._grammar_is_ready

    @property
    def _grammar_is_ready(self) -> bool:
        return self.grammars is not None and self.grammars.has_ready

    def wait_for_work(self) -> bool:
        """Return whether there is work; sleeps while all requests wait for their grammars."""
        if not self.has_work and self.grammars is not None:
            self.grammars.wait()
        return self.has_work

    @property
    def wakes_at_s(self) -> float:
        """Return when an idle engine will have work without a new request; infinite if never."""
        return self.scheduler.opens_at_s

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: Request, resumed_tokens: ResumedTokens = ()) -> None:
        """Queue a request; raises RequestError if it can never run on this engine.

        `resumed_tokens` resumes a request that another engine began: by index the tokens that its
        sequences have generated, None for an ended sequence. They continue as after a preemption.
        """
        if request.request_id in self._requests:
            raise RequestError("This request id is in use.", param="request_id")
        check(request, self.settings.max_model_len, self.vocab_size, self.eos_token_ids)
        sampling, limit = request.sampling, longest(request, self.settings)
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self.eos_token_ids
        sequences = []
        for index in range(sampling.n):
            known = resumed_tokens[index] if resumed_tokens else []
            if known is None:
                continue
            sequence = Sequence(
                self._take_sequence_id(),
                request,
                index,
                num_groups=len(self.kv.pools),
                stop_ids=stop_ids,
                max_len=limit,
                seed=self._seed(request),
                kv_read=self.settings.cache.read if request.kv_read is None else request.kv_read,
                kv_keep=self.settings.cache.keep if request.kv_keep is None else request.kv_keep,
                scaled_len=scaled_len(request, self.settings),
            )
            sequence.resume(known)
            sequences.append(sequence)
        if not sequences:
            return
        compiled = None
        if sampling.grammar is not None:
            compiled = self._compiler(sampling.grammar).compile(
                request.request_id, sampling.grammar, request.principal.cache_salt
            )
        self._requests[request.request_id] = sequences
        if compiled is not None or sampling.grammar is None:
            self._enqueue(sequences, compiled)
        else:
            self._must_report = True

    def _take_sequence_id(self) -> int:
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def _compiler(self, grammar: Grammar) -> Grammars:
        if self.grammars is None:
            raise RequestError(
                "Structured output needs a tokenizer, and there is none here.",
                param=grammar.param,
                code="no_tokenizer",
            )
        return self.grammars

    def _enqueue(self, sequences: list[Sequence], compiled: Compiled | None) -> None:
        """Give the sequences of one request to the scheduler, the first before its siblings.

        Resumed sequences do not share a prompt, so each is added by itself.
        """
        if compiled is not None:
            for sequence in sequences:
                sequence.grammar = compiled.state()
        fresh = [sequence for sequence in sequences if not sequence.num_generated]
        if fresh:
            fresh[0].forks = fresh[1:]
        for sequence in sequences:
            if sequence.num_generated or sequence is fresh[0]:
                self.scheduler.add(sequence)
        self._must_report = self._must_report or not self.scheduler.has_work

    def flush(self) -> None:
        """Expect no more requests: those that wait for a full batch start."""
        self._flushed = self.grammars is not None and self.grammars.num_waiting > 0
        self.scheduler.gate.flush()

    def drain_refusals(self) -> list[tuple[int, RequestError]]:
        """Return (request id, error) of requests refused after `add`, for example their grammar."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _admit_compiled(self) -> None:
        """Enqueue requests whose grammars are compiled; refuse those whose compilation failed."""
        if self.grammars is None:
            return
        for request_id, outcome in self.grammars.ready():
            if isinstance(outcome, RequestError):
                self._refuse(request_id, outcome)
            elif request_id in self._requests:
                self._enqueue(self._requests[request_id], outcome)
                if self._flushed:
                    self.scheduler.gate.flush()

    def _refuse(self, request_id: int, error: RequestError) -> None:
        """End a request with `error` instead of an update."""
        self.abort(request_id)
        self._must_report = True
        self._refusals.append((request_id, error))

    def _seed(self, request: Request) -> int:
        """Return the request's own seed, or one that no other request of this engine has."""
        if request.sampling.seed is not None:
            return request.sampling.seed % 2**64
        return (self.settings.seed + (request.request_id + 1) * GOLDEN_RATIO_64) % 2**64

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Drop a request, or one of its sequences, at any moment; its blocks are freed at once.

        No update follows. An unknown id is ignored: the request may just have finished.
        """
        if self.grammars is not None and index is None:
            self.grammars.forget(request_id)
        for sequence in list(self._requests.get(request_id, ())):
            if index is None or sequence.index == index:
                self._drop_fork(sequence)
                self.scheduler.finish(sequence)
                self._leave(sequence)
                self._must_report = True

    def _drop_fork(self, sequence: Sequence) -> None:
        """Remove a fork from its parent, the only queue in which it waits."""
        for sibling in self._requests[sequence.request.request_id]:
            if sequence in sibling.forks:
                sibling.forks.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def step(self) -> tuple[list[SequenceUpdate], StepRecord]:
        """Plan as many steps as may be in flight, and take the result of the oldest.

        Returns the updates of that step's sequences, and its record.
        """
        overlap = self.scheduler.overlap
        while overlap.may_plan and self._begin():
            pass
        return self._end(overlap.steps.popleft())

    def _begin(self) -> bool:
        """Plan a step and submit it; returns False if nothing is to be added to those in flight."""
        started_s, overlap = self.clock.now_s(), self.scheduler.overlap
        self._must_report = False
        self._admit_compiled()
        plan = self.scheduler.schedule()
        advanced = self._advanced(plan) if overlap.depth else []
        for sequence in self.scheduler.policy.drain_shed():
            self._refuse(sequence.request.request_id, ShedError())
        is_ahead = bool(overlap.steps)
        if is_ahead and is_nothing(plan):
            return False
        planned_s, drafts = self.clock.now_s(), self.scheduler.drafts
        step = StepInFlight(plan=plan, started_s=started_s, planned_s=planned_s, drafts=drafts.now)
        step.is_ahead = is_ahead
        if plan.new:
            step.first = count_first_scheduled(plan, self.scheduler, planned_s)
        step.sequences = advanced
        # shedding a request ends all its sequences, also those in this plan
        step.released_ids = {s.sequence_id for s in advanced if s.state == FINISHED}
        try:
            step.masks = self._submit(plan)
        except Exception as error:
            step.error = error
        overlap.steps.append(step)
        return True

    def _advanced(self, plan: StepPlan) -> list[Sequence]:
        """Return the sequences that `plan` advances, row by row."""
        sequences = map(self.scheduler.by_id, [row.sequence_id for row in plan.scheduled])
        return [sequence for sequence in sequences if sequence is not None]

    def _end(self, step: StepInFlight) -> tuple[list[SequenceUpdate], StepRecord]:
        """Collect `step` and update its sequences."""
        self.scheduler.drafts.now = step.drafts
        result = self._collect(step)
        collected_s, proves = self.clock.now_s(), bool(result.failed and not result.samples)
        plan, filtered = step.filter_result(result)
        failed = self._fail(step, result)
        updates = [SequenceUpdate(s.request_id, s.index, [], "error") for s in failed]
        updates += self.scheduler.update(plan, filtered)
        if proves:
            self._abandon(list(self.scheduler.overlap.steps))
            check_runtime(self.executor, self.scheduler, self._take_sequence_id())
        for sequence in failed + self.scheduler.ended_sequences:
            self._leave(sequence)
            if sequence.grammar is not None and sequence.grammar.error:
                self._refuse(sequence.request_id, grammar_error(sequence))
        if self._refusals:
            refused = {request_id for request_id, _ in self._refusals}
            updates = [update for update in updates if update.request_id not in refused]
        record = self.recorder.record(
            step, result, collected_s, self.grammars, is_idle=not self.has_work
        )
        if not result.failed:
            self.recorder.learn(record)
        return updates, record

    def _collect(self, step: StepInFlight) -> StepResult:
        """Return the step's result; if it raised, without the rows that raise alone."""
        try:
            if step.error is not None:
                raise step.error
            return self.executor.collect()
        except ExecutorLostError:
            raise
        except Exception:
            return self._recover(step)

    def _recover(self, step: StepInFlight) -> StepResult:
        """Return the result of a step that raised: of its halves, or none where more are queued."""
        number, num_rows = step.plan.step, len(step.plan.scheduled)
        if steps := self.scheduler.overlap.steps:
            log.exception("step %d failed; its %d sequences begin again", number, num_rows)
            self._abandon([step, *steps])
            return StepResult(number, [])
        log.exception("step %d failed; its %d sequences are run in halves", number, num_rows)
        plan = step.resolve() if self.scheduler.overlap.depth else step.plan
        return bisect_step(plan, self.scheduler, self._run)

    def _abandon(self, steps: list[StepInFlight]) -> None:
        """Abandon steps in flight, the last ones that were submitted; their sequences restart."""
        if steps:
            assert isinstance(self.executor, OverlappingExecutor)
            self.executor.abandon()
            abandon(self.scheduler, steps)

    def _submit(self, plan: StepPlan) -> StepMasks | None:
        """Submit and sample; grammar masks are computed while the model runs."""
        masks, made = begin_masks(plan, self.scheduler.by_id, self.grammars), GrammarMasks()
        try:
            self.executor.submit(plan)
        finally:
            if masks is not None:
                made = masks.finish()
        self.executor.sample(plan.step, made)
        return masks

    def _run(self, plan: StepPlan) -> StepResult:
        """Submit, sample and collect."""
        self._submit(plan)
        return self.executor.collect()

    def _fail(self, step: StepInFlight, result: StepResult) -> list[Sequence]:
        """End the sequences that the runtime could not advance.

        One that was preempted meanwhile ends too, because it would fail again.
        """
        failed = []
        for sequence_id, reason in result.failed.items():
            sequence = self.scheduler.by_id(sequence_id) or step.find(sequence_id)
            if sequence is not None:
                log.error("request %d failed: %s", sequence.request_id, reason)
                self.kv.invalidate(sequence)
                self.scheduler.finish(sequence)
                failed.append(sequence)
        return failed

    def forget(self, owner: bytes) -> None:
        """Drop the blocks of `owner` (`Principal.block_owner`), or of names that begin with it,
        from all tiers."""
        sequences = [s for siblings in self._requests.values() for s in siblings]
        forget_owner(self.kv, owner, sequences)
        self.scheduler.drafts.forget_owner(owner)
        self._must_report = True

    def check_integrity(self) -> None:
        """Assert every invariant of the engine; when idle, also that nothing is allocated."""
        self.scheduler.check_integrity()
        is_busy = self.scheduler.transfers.is_busy or self.scheduler.overlap.steps
        if not self._requests and not is_busy:
            assert self.kv.num_used == 0, f"{self.kv.num_used} blocks leaked"
            assert self.scheduler.transfers.host.num_used == 0, "host blocks leaked"
            assert not self.scheduler.running and not self.scheduler.num_waiting


def grammar_error(sequence: Sequence) -> RequestError:
    """Return the 400 for a grammar that exceeded llguidance's limits during an answer."""
    grammar, state = sequence.request.sampling.grammar, sequence.grammar
    assert grammar is not None and state is not None
    return RequestError(
        f"{grammar.param} is too complex after {sequence.num_generated} tokens: {state.error}.",
        param=grammar.param,
        code="grammar_too_complex",
    )
