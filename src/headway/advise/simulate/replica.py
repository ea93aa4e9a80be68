"""A simulated server: admission, and one engine or several, each with its own clock.

Engine and admission are the server's own. The engine's clock runs ahead of the admission's while a
step lasts: a request that arrives meanwhile is judged at its own time by the steps before, and
joins the next step, as at a real server.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from headway.admit.admission import Admission, Rules, Ticket
from headway.admit.lengths import AdmissionRequest
from headway.admit.prefixes import PAGE_TOKENS
from headway.advise.simulate.executor import AnswerScript, SimulatedExecutor
from headway.advise.simulate.truth import Truth
from headway.config.memory_plan import with_open_blocks
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.core.plan import Description, Executor
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.core.service import ServiceClass, with_reachable_objectives
from headway.core.slo import DEFAULT_CLASS
from headway.edge.keys import Caller, anonymous_caller
from headway.engine.build import build_engine
from headway.engine.calibration import calibrate, unloaded_times, warm_up
from headway.engine.handover import Handover
from headway.engine.policy import POLICIES
from headway.perf.model import StepModel, prior_of
from headway.spec import ModelSpec

CALIBRATION_S = 0.8
"""Seconds for which a starting server measures itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """Setup of a simulated server: model, settings, machine, classes, admission."""

    spec: ModelSpec
    settings: Settings
    description: Description
    classes: dict[str, ServiceClass]
    max_queue: int | None = None
    max_queue_wait_s: float | None = None
    acceptance: tuple[float, ...] = ()
    belief: StepModel | None = None
    """What its cost model has learned before; without it the server measures itself first."""
    ends: bool = False
    """Whether answers end with the end token where the trace says so; else at their limit."""

    @property
    def rules(self) -> Rules:
        """Return the admission's rules."""
        scheduler: SchedulerConfig = self.settings.scheduler
        return Rules(
            max_queue=self.max_queue,
            max_queue_wait_s=self.max_queue_wait_s,
            scheduler=scheduler,
            order=POLICIES[scheduler.policy].queue_order,
            prefix_cache=bool(self.settings.cache.prefix_cache),
        )


class SimulatedJob(msgspec.Struct, kw_only=True, eq=False):
    """One request at a server, its results, and its callbacks.

    `began` and `ended` are called with its first and its last update, and the time at which its
    client reads it.
    """

    request: Request
    ticket: Ticket
    chunk_s: list[float]
    chunk_tokens: list[int]
    """When each part of the answer is read, and how many tokens it holds."""
    answer: list[int] | None
    """All tokens of the answer, where another turn repeats them."""
    began: Callable[[SequenceUpdate, float], None]
    ended: Callable[[SequenceUpdate, float], None]
    fail: Callable[[RequestError, float], None]


class FinishedStep(msgspec.Struct, eq=False):
    """A step that has been computed, and ends in the future of the world."""

    ends_s: float
    updates: list[SequenceUpdate]
    record: StepRecord | None
    refusals: list[tuple[int, RequestError]] = []
    handed: list[tuple[int, bytes]] = []
    """Requests that were handed over, and their parcels."""


@dataclass(frozen=True, slots=True)
class HandedRequest:
    """A request from another engine, on its way to this one."""

    request: Request
    parcel: bytes


class SimulatedAdmission:
    """Admission before all engines of a server, on the clock of arrivals."""

    def __init__(self, served: ServerSetup, replicas: "list[SimulatedReplica]") -> None:
        self.served = served
        self.clock = VirtualClock()
        self.classes = dict(served.classes)
        default, alone = self.classes[DEFAULT_CLASS], unloaded_times(replicas[0].engine)
        self.classes[DEFAULT_CLASS] = with_reachable_objectives(default, alone)
        self.admission = Admission(self.clock, served.rules, len(replicas))
        self.caller: Caller = anonymous_caller()
        cache = served.settings.cache
        for number in range(len(replicas)):
            tokens = (max(cache.token_blocks) - 1) * cache.block_size
            self.admission.queues.on_engine_ready(number, max(tokens, PAGE_TOKENS))

    def class_of(self, name: str) -> ServiceClass:
        """Return the service class of that name; the default where the server has none."""
        return self.classes.get(name) or self.classes[DEFAULT_CLASS]

    def arrive(
        self, now_s: float, name: str, prompt: list[int], sampling: SamplingParams
    ) -> Ticket:
        """Admit a request to the engine that its ticket names, or raise RequestError."""
        self.clock.advance_to(now_s)
        service_class = self.class_of(name)
        ticket = self.admission.arrive(
            self.caller, service_class, self.served.settings.max_num_seqs
        )
        try:
            ticket.set_prompts(self._admission_request(prompt, sampling))
        except RequestError:
            ticket.close()
            raise
        return ticket

    def _admission_request(self, prompt: list[int], sampling: SamplingParams) -> AdmissionRequest:
        return AdmissionRequest(
            lengths=[len(prompt)],
            sampling=sampling,
            max_model_len=self.served.settings.max_model_len,
            prompts=[prompt],
            answer_param="max_tokens",
        )

    def on_step(self, engine: int, stepped: "FinishedStep") -> None:
        """Take the record of a step that has ended."""
        self.clock.advance_to(stepped.ends_s)
        if stepped.record is not None:
            stepped.record.engine = engine
            self.admission.queues.on_record(stepped.record)


def without_overlap(settings: Settings) -> Settings:
    """Return the settings with one step at a time: planning takes no time in a simulation."""
    scheduler = dataclasses.replace(settings.scheduler, overlap=0)
    return dataclasses.replace(settings, scheduler=scheduler)


class SimulatedReplica:
    """An engine on a virtual clock."""

    def __init__(
        self,
        served: ServerSetup,
        truth: Truth,
        seed: int = 0,
        *,
        clock: VirtualClock | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Build the engine; an `executor` that really computes comes with the `clock` that it
        advances."""
        self.served, self.truth = served, truth
        settings, spec = without_overlap(served.settings), served.spec
        self.clock = clock or VirtualClock()
        self.lengths: dict[int, int] = {}
        """Lengths of answers that end with the end token, by the seed of their request."""
        prior = prior_of(spec, served.description, settings.dtype, settings.cache.dtype)
        self.script = AnswerScript(
            spec.vocab_size,
            tuple(i for i in spec.eos_token_ids if 0 <= i < spec.vocab_size),
            self.lengths,
            served.acceptance,
        )
        executor = executor or SimulatedExecutor(
            self.clock,
            truth,
            self.script,
            windows=settings.cache.reaches,
            description=served.description,
            block_bytes=settings.cache.block_bytes or block_bytes(spec, settings),
            copied_byte_s=prior.copied_byte_s,
            num_experts=experts_of(spec),
            seed=seed,
        )
        self.engine = build_engine(
            executor,
            settings,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            clock=self.clock,
            prior=prior,
        )
        if isinstance(executor, SimulatedExecutor):
            self.engine.recorder.count = executor.count  # it has counted them already
        if served.belief is not None:
            self.engine.cost.copy_from(served.belief)
        else:
            warm_up(self.engine)
            calibrate(self.engine, CALIBRATION_S)
        self.started_s = self.clock.now_s()
        self.inbox: deque[tuple[float, Request | HandedRequest | int]] = deque()
        """(when it reaches the engine; a request, or the number of one to abort)."""
        self.handover: Handover | None = None
        self.hands_over = False
        """Whether requests are handed over after their first token."""
        self.jobs: dict[int, SimulatedJob] = {}
        self.is_stepping = False
        self.busy_s = 0.0
        self.num_steps = self.num_tokens = 0
        """Steps, and tokens of the answers that have ended."""

    def submit(self, at_s: float, job: SimulatedJob) -> None:
        """Send a request to the engine, which has it at `at_s`."""
        number = job.request.request_id
        self.jobs[number] = job
        job.ticket.on_sent(0, number)
        self.inbox.append((at_s, job.request))

    def take(self, at_s: float, job: SimulatedJob, parcel: bytes, from_s: float) -> None:
        """Continue a request of an engine whose clock began at `from_s`; it arrives here at
        `at_s`."""
        shift_s = self.started_s - from_s
        job.request = replace(job.request, arrived_s=job.request.arrived_s + shift_s)
        self.jobs[job.request.request_id] = job
        self.inbox.append((at_s, HandedRequest(job.request, parcel)))

    def drop(self, at_s: float, number: int) -> None:
        """Abort a request whose client has left."""
        job = self.jobs.pop(number, None)
        if job is not None:
            job.ticket.close()
            self.inbox.append((at_s, number))

    # ── the engine ──────────────────────────────────────────────────────────────────────────

    def next_s(self, now_s: float) -> float | None:
        """Return when the engine may run a step, now or later; None while it has no work."""
        if self.is_stepping:
            return None
        if self.engine.has_work:
            return now_s
        wakes_s = self.engine.wakes_at_s - self.started_s
        first_s = min((at_s for at_s, _ in self.inbox), default=wakes_s)
        due_s = max(min(wakes_s, first_s), now_s)
        return due_s if due_s < float("inf") else None

    def step(self, now_s: float) -> FinishedStep | None:
        """Take the messages that have arrived and run one step from now; None where there is no
        work."""
        self.clock.advance_to(self.started_s + now_s)
        refusals: list[tuple[int, RequestError]] = []
        for _ in range(len(self.inbox)):
            at_s, message = self.inbox.popleft()
            if at_s > now_s:
                self.inbox.append((at_s, message))
            elif isinstance(message, int):
                self.engine.abort(message)
            elif isinstance(message, HandedRequest):
                assert self.handover is not None
                refused = self.handover.take_over(message.request, message.parcel)
                assert not refused, refused
            else:
                try:
                    self._add(message)
                except RequestError as error:
                    refusals.append((message.request_id, error))
        if not self.engine.has_work:
            return FinishedStep(now_s, [], None, refusals) if refusals else None
        updates, record = self.engine.step()
        refusals += self.engine.drain_refusals()
        self.is_stepping = True
        self.num_steps += 1
        self.busy_s += record.duration_s
        handed = self.handover.take_due() if self.handover is not None else []
        return FinishedStep(self.clock.now_s() - self.started_s, updates, record, refusals, handed)

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        if self.hands_over and self.handover is not None:
            self.handover.offer(request.request_id)

    def finish(self, stepped: FinishedStep, read_s: list[float]) -> None:
        """End a step: give each request its tokens, and the time at which they are read."""
        self.is_stepping = False
        jobs = self.jobs
        for update, at_s in zip(stepped.updates, read_s, strict=True):
            job = jobs.get(update.request_id)
            if job is None:
                continue
            tokens = update.token_ids
            if tokens:
                job.chunk_s.append(at_s)
                job.chunk_tokens.append(len(tokens))
            if job.answer is not None:
                job.answer += tokens
            if update.first_scheduled_s is not None:  # it comes with the first token
                job.ticket.on_first_token(0)
                job.began(update, at_s)
            if update.finish_reason is not None:
                del jobs[update.request_id]
                num_tokens = sum(job.chunk_tokens)
                self.num_tokens += num_tokens
                job.ticket.close(len(job.request.prompt_token_ids) + num_tokens)
                job.ended(update, at_s)
        for number, error in stepped.refusals:
            job = self.jobs.pop(number, None)
            if job is not None:
                job.ticket.close()
                job.fail(error, stepped.ends_s)


def build_replicas(
    served: ServerSetup, truth: Callable[[int], Truth], count: int, seed: int
) -> list[SimulatedReplica]:
    """Return `count` equal replicas, each on a machine of its own: `truth` of its seed."""
    return [SimulatedReplica(served, truth(seed + 1000 * n), seed=seed + n) for n in range(count)]


def block_bytes(spec: ModelSpec, settings: Settings) -> tuple[int, ...]:
    """Return the bytes of a block by KV group."""
    dtype = settings.cache.dtype or settings.dtype
    if dtype == "none":
        return ()
    groups = with_open_blocks(spec.kv_groups, spec, settings.dtype, dtype)
    return tuple(g.block_bytes(dtype, settings.cache.block_size) for g in groups)


def experts_of(spec: ModelSpec) -> tuple[int, int, int]:
    """Return (layers with experts, experts of each, experts per token); zeros for a dense model."""
    experts = spec.experts
    return (spec.num_sparse, experts.count, experts.active) if experts else (0, 0, 0)
