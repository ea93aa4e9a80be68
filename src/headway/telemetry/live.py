"""Telemetry of one served model, in the server's process.

The engine's client passes step records to it and the server passes requests; `/metrics`, `/stats`
and `/trace` read it. A step costs a few additions and a token two appends: percentiles, ratios and
verdicts are computed from the raw values when they are read.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import numpy as np

from headway.config.resolve import Settings
from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError, ShedError
from headway.core.plan import Ceilings, Description
from headway.core.records import StepRecord
from headway.core.request_source import RequestSource
from headway.core.service import (
    ServiceClass,
    UnloadedTimes,
    service_classes,
    with_reachable_objectives,
)
from headway.core.slo import DEFAULT_CLASS, Slo
from headway.perf.roofline import ModelWork, Roof
from headway.spec import ModelSpec
from headway.telemetry.contention import CoreWatch, CpuWatch
from headway.telemetry.counting import (
    count_preemptions,
    count_price,
    count_request,
    count_slo,
    count_step,
    expect_classes,
    expect_drafts,
    expect_tasks,
    show_engines,
    show_window,
)
from headway.telemetry.engines import EngineDemand, Engines, promised_tpot_s
from headway.telemetry.goodput import FAILED, INVALID, MOVED, OK, REFUSED, EndedRequest
from headway.telemetry.prefixes import RecentPrompts
from headway.telemetry.registry import Registry
from headway.telemetry.request_log import CLIENT_DISCONNECTED, RequestLog
from headway.telemetry.snapshot import WINDOWS_S, WindowStats
from headway.telemetry.summary import WindowContext, window
from headway.telemetry.timeline import RequestTimeline
from headway.telemetry.trace import chrome_trace
from headway.telemetry.windows import Slots

MAX_STORED_STEPS, MAX_STORED_REQUESTS = 8192, 2048
MAX_SUMMARY_TIME_SHARE = 0.01
"""Largest share of a core for computing the figures of a window: 5 ms of work, twice a second."""


class Probed(Protocol):
    """Message of the engine after a probe of the machine."""

    ceilings: Ceilings
    alone: UnloadedTimes


class Introduction(Protocol):
    """Message of the engine when it is ready."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    group_blocks: list[int]
    dtype: str
    kv_dtype: str
    settings: dict[str, str]
    description: Description
    alone: UnloadedTimes
    plan: Settings | None
    kv_read: float
    kv_keep: float


class Telemetry:
    """Counts, timelines and windows of one model."""

    def __init__(
        self,
        names: list[str],
        spec: ModelSpec,
        *,
        clock: Clock | None = None,
        prefix: str = "headway",
        classes: dict[str, ServiceClass] | None = None,
        slo_target: float = 0.9,
        price_per_hour: float | None = None,
        cached_price: float = 0.1,
        version: str = "",
    ) -> None:
        self.names, self.spec, self.version = names, spec, version
        self.clock = clock or SystemClock()
        self.registry = Registry(names[0], prefix=prefix)
        self.classes = dict(classes or service_classes())
        self._default, self._alone = self.classes[DEFAULT_CLASS], UnloadedTimes()
        expect_classes(self.registry, self.classes.values())
        expect_tasks(self.registry)
        self.slo_target, self.price_per_hour = slo_target, price_per_hour
        self.cached_price = cached_price
        self.started_s = self.clock.now_s()
        self.slots = Slots(self.started_s, len(spec.kv_groups))
        self.core_watch: CoreWatch | None = None
        self.cpu_watch: CpuWatch | None = None
        """Samplers of core use and of this process' CPU time, read once a second where set."""
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STORED_STEPS)
        self.finished: deque[RequestTimeline] = deque(maxlen=MAX_STORED_REQUESTS)
        self.on_finish: Callable[[RequestTimeline], None] = lambda timeline: None
        """Callback for each ended request, for traces."""
        self.request_log: RequestLog | None = None
        """Log with one line per request, where set."""
        self.on_record: Callable[[StepRecord], None] = lambda record: None
        """Callback for each step, for admission."""
        self.on_engine_ready: Callable[[int, Introduction], None] = lambda engine, ready: None
        """Callback for each engine that becomes ready, for admission."""
        self.on_engine_death: Callable[[int], None] = lambda engine: None
        """Callback for each engine that died, for admission."""
        self.ready: Introduction | None = None
        self.roof, self.work = Roof(Ceilings()), ModelWork(spec, spec.dtype)
        self._live: dict[RequestTimeline, list[int]] = {}  # with its request ids in the engine
        self._by_engine: dict[int, RequestTimeline] = {}
        self.prompts = RecentPrompts(self.clock)
        self.engines = Engines(EngineDemand(self.clock, lambda: promised_tpot_s(self.classes)))
        self._windows: dict[int, tuple[float, WindowStats]] = {}
        self._counted: dict[str, int] = {}
        self._counted_first, self._counted_work = 0, (0.0, 0.0)
        self.num_requests = self.num_missed = 0
        self.errors: dict[str, int] = {}
        """Refused and failed requests by code."""

    # ── messages of the engine ──────────────────────────────────────────────────────────────

    def on_ready(self, ready: Introduction, engine: int = 0) -> None:
        """Take the introduction of an engine that is ready, for the first time or again."""
        self.ready = ready
        self._update_default_class(ready.alone)
        dtype = ready.dtype or self.spec.dtype
        weight, shares = ready.description.bytes_per_weight, (ready.kv_read, ready.kv_keep)
        self.work = ModelWork(self.spec, dtype, ready.kv_dtype, weight, *shares)
        self.roof.take(ready.description.ceilings)
        self.roof.judge_residence(self.work.weight_bytes)
        capacity = max(ready.group_blocks) * ready.block_size
        self.registry.values["cache_config_info"] = {
            (
                str(ready.block_size),
                ready.kv_dtype,
                str(bool(ready.settings.get("prefix_cache"))),
                str(ready.group_blocks[0]),
                str(capacity),
                f"{capacity / ready.max_model_len:.2f}",
            ): 1.0
        }
        if self.proposers:
            expect_drafts(self.registry, self.proposers, int(ready.settings["max_drafts"]))
        self.engines.ready.add(engine)
        self.on_engine_ready(engine, ready)

    def on_probe(self, probed: Probed) -> None:
        """Take new ceilings of the machine and the time of a request that runs alone."""
        self._update_default_class(probed.alone)
        self.advance()
        self.slots.current.probe_shares.append(probed.ceilings.last_share)
        self.roof.take(probed.ceilings)

    def _update_default_class(self, alone: UnloadedTimes) -> None:
        """Set the objectives of the default class to what this machine can meet at its best.

        Load of other processes at the start raises them only until a quieter moment shows a
        shorter time.
        """
        self._alone = self._alone.at_best(alone)
        self.classes[DEFAULT_CLASS] = with_reachable_objectives(self._default, self._alone)

    def on_step(self, record: StepRecord) -> None:
        """Take one step record."""
        self.advance()
        slot = self.slots.current
        slot.add(record)
        slot.saved_s += record.num_cached_tokens * record.alone_s_per_token
        count_step(self.registry, record)
        self.steps.append(record)
        num_preemptions = self.engines.on_record(record)
        self.on_record(record)
        for request_id, index, computed in record.prefilling:
            timeline = self._by_engine.get(request_id)
            if timeline is not None:
                timeline.computed[request_id, index] = computed
                timeline.last_prefill_s = self.clock.now_s()
        if num_preemptions:
            self._note_preemptions(record, num_preemptions)

    def _note_preemptions(self, record: StepRecord, new: int) -> None:
        count_preemptions(self.registry, record, new)
        self.slots.current.num_preemptions += new
        for request_id, num_made in record.preempted:
            timeline = self._by_engine.get(request_id)
            if timeline is not None:
                timeline.on_preempted(num_made)

    def on_death(self, engine: int = 0) -> None:
        """Forget a dead engine."""
        self.engines.on_death(engine)
        self.on_engine_death(engine)

    # ── messages of the server ──────────────────────────────────────────────────────────────

    def begin(
        self,
        request_id: str,
        *,
        arrived_s: float,
        num_prompt: int,
        num_choices: int,
        service_class: ServiceClass | None = None,
        slo: Slo | None = None,
        parent: str | None = None,
        source: RequestSource | None = None,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> RequestTimeline:
        """Return the timeline of a new request that is about to be sent to the engine."""
        self.advance()
        self.slots.current.arrivals += 1
        self.num_requests += 1
        timeline = RequestTimeline(
            self.clock.now_s,
            self.slots,
            self,
            request_id=request_id,
            arrived_s=arrived_s,
            num_prompt=num_prompt,
            num_choices=num_choices,
            service_class=service_class or self.classes[DEFAULT_CLASS],
            slo=slo,
            parent=parent,
            source=source,
        )
        timeline.n, timeline.max_tokens = n, max_tokens
        self._live[timeline] = []
        return timeline

    def on_submit(self, timeline: RequestTimeline, engine_request_id: int) -> None:
        """Note the id under which one of the request's prompts runs in the engine."""
        self._by_engine[engine_request_id] = timeline
        self._live[timeline].append(engine_request_id)

    def on_first_token(self, timeline: RequestTimeline) -> None:
        """Count the prompt of a request whose first token was sent."""
        self.slots.current.prompt_tokens += timeline.num_prompt
        self.registry.add("prompt_tokens", timeline.num_prompt)
        self.registry.observe("time_to_first_token_seconds", timeline.ttft_s)

    def on_end(self, timeline: RequestTimeline, ended: EndedRequest) -> None:
        """Count an ended request and write its log line."""
        self.advance()
        for engine_id in self._live.pop(timeline, ()):
            self._by_engine.pop(engine_id, None)
        self.finished.append(timeline)
        if ended.outcome != MOVED:
            self.slots.current.ended.append(ended)
            self._count_slo(ended)
        count_price(self.registry, timeline, ended, self.cached_price)
        if ended.outcome == OK:
            count_request(self.registry, timeline, ended)
        self.on_finish(timeline)
        if self.request_log is not None:
            self.request_log.log_end(timeline, ended)
        timeline.error = None  # its traceback holds the request's body and prompts

    def _count_slo(self, ended: EndedRequest) -> None:
        count_slo(self.registry, ended)
        self.num_missed += bool(ended.missed)

    def on_tool_call(self, fits: bool) -> None:
        """Count a tool call; `fits` says whether its arguments match the tool's parameters."""
        self.registry.add("tool_calls")
        if not fits:
            self.registry.add("validation_failures", 1, "tool_arguments")

    def on_sequence_end(self, reason: str) -> None:
        """Count a sequence by finish reason."""
        self.registry.add("request_success", 1, reason)

    def on_invalid_answer(self, kind: str) -> None:
        """Count an answer that does not satisfy its grammar, by kind (`json` …)."""
        self.registry.add("validation_failures", 1, kind)

    def on_rejection(
        self,
        error: RequestError,
        timeline: RequestTimeline | None = None,
        service_class: str = DEFAULT_CLASS,
        source: RequestSource | None = None,
    ) -> None:
        """Count a request refused before it ran: for its body, or for load or state."""
        code = error.code or "unknown"
        self.errors[code] = self.errors.get(code, 0) + 1
        outcome = INVALID
        if error.status in (429, 503):
            outcome = REFUSED
            self.registry.add("admission_rejections", 1, error.reason or code)
        elif error.status in (400, 413) and code != CLIENT_DISCONNECTED:
            self.registry.add("validation_failures", 1, "request")
            if error.reason is not None:
                self.registry.add("admission_rejections", 1, error.reason)
        if timeline is not None:
            timeline.error = error
            timeline.end(outcome)
            return
        if self.request_log is not None and code != CLIENT_DISCONNECTED:
            self.request_log.log_rejection(error, outcome, service_class, source)
        if outcome == REFUSED:
            self._count_early_rejection(service_class)

    def _count_early_rejection(self, service_class: str) -> None:
        """Count a refusal for load or state of a request without a timeline as a miss."""
        self.advance()
        ended = EndedRequest(
            service_class=service_class,
            outcome=REFUSED,
            ended_s=self.clock.now_s(),
            prompt_tokens=0,
            output_tokens=0,
            missed=(REFUSED,),
        )
        self.slots.current.ended.append(ended)
        self._count_slo(ended)

    def on_failure(self, timeline: RequestTimeline, error: RequestError) -> None:
        """Count an admitted request that ended with `error`; 4xx and shed ones as refused."""
        if error.status < 500 or isinstance(error, ShedError):
            self.on_rejection(error, timeline)
            return
        code = error.code or "unknown"
        self.errors[code] = self.errors.get(code, 0) + 1
        timeline.error = error
        timeline.end(FAILED)

    def advance(self) -> None:
        """Begin a new slot when a new second has begun, after counting tokens of the old one."""
        now_s = self.clock.now_s()
        if int(now_s) > self.slots.current.second:
            self.count_tokens()
            if self.cpu_watch is not None:
                self.slots.current.host_s = self.cpu_watch.seconds()
            self.slots.at(now_s)
            use = self.core_watch.sample() if self.core_watch is not None else None
            if use is not None:
                self.slots.current.cores.append(use)
            self._counted, self._counted_first = {}, 0
            self._counted_work = 0.0, 0.0

    def count_tokens(self) -> None:
        """Bring the token metrics up to date: once a second, and before they are read."""
        slot = self.slots.current
        itl = self.registry.histograms["inter_token_latency_seconds"]
        num_new = slot.first_tokens - self._counted_first
        self._counted_first = slot.first_tokens
        for name, gaps in slot.gaps.items():
            begin, end = self._counted.get(name, 0), len(gaps)
            if end > begin:
                itl.observe_all(np.frombuffer(gaps)[begin:])
                self._counted[name] = end
                num_new += end - begin
        self.registry.add("generation_tokens", num_new)
        flops, read = self._counted_work
        parts = slot.decode, slot.prefill
        self._counted_work = sum(map(self.work.flops, parts)), sum(map(self.work.num_bytes, parts))
        self.registry.add("estimated_flops_per_gpu", max(self._counted_work[0] - flops, 0.0))
        self.registry.add("estimated_read_bytes_per_gpu", max(self._counted_work[1] - read, 0.0))

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    @property
    def usd(self) -> float:
        """Return the cost of the server in dollars since it started."""
        return (self.price_per_hour or 0.0) * (self.clock.now_s() - self.started_s) / 3600

    def render(self) -> bytes:
        """Return the text of `/metrics`."""
        self.advance()
        self.count_tokens()
        registry, last = self.registry, self.engines.last
        registry.show_steps(self.engines.last_steps)
        capacity = last.num_waiting - last.num_deferred
        registry.set("num_requests_waiting_by_reason", last.num_deferred, "deferred")
        registry.set("num_requests_waiting_by_reason", capacity, "capacity")
        registry.values["queue_age_seconds"] = {
            (name,): age_s for name, age_s in self.queue_ages_s().items()
        }
        show_engines(registry, self.engines.num_by_role, self.engines.demand.engines_needed)
        registry.set("cost_usd", self.usd)
        tiers = self.engines.tier_bytes.items()
        registry.values["kv_tier_bytes"] = {(tier,): float(size) for tier, size in tiers}
        show_window(registry, self.window(WINDOWS_S[0]))
        return registry.render()

    def queue_ages_s(self) -> dict[str, float]:
        """Return the age of the oldest request that waits for its first step, by class."""
        ages_s, now_s = dict.fromkeys(self.classes, 0.0), self.clock.now_s()
        for timeline in self._live:
            if timeline.scheduled_s is None and not timeline.computed:
                name = timeline.service_class.name
                ages_s[name] = max(ages_s.get(name, 0.0), now_s - timeline.arrived_s)
        return ages_s

    def window(self, seconds: int) -> WindowStats:
        """Return the figures of the last `seconds`, cached for a short time under load."""
        now_s = self.clock.now_s()
        fresh_until_s, cached = self._windows.get(seconds, (now_s, None))
        if cached is None or now_s >= fresh_until_s:
            slots, covered_s = self.slots.last(seconds, now_s)
            cached = window(seconds, slots, covered_s, self._window_context())
            spent_s = self.clock.now_s() - now_s
            self._windows[seconds] = now_s + spent_s / MAX_SUMMARY_TIME_SHARE, cached
        return cached

    @property
    def proposers(self) -> tuple[str, ...]:
        """Return the proposers of draft tokens; empty without speculation."""
        method = self.ready.settings.get("speculate", "off") if self.ready else "off"
        return () if method == "off" else tuple(method.split(","))

    def _window_context(self) -> WindowContext:
        return WindowContext(
            proposers=self.proposers,
            draft_failure=self.engines.last.draft_failure,
            work=self.work,
            roof=self.roof,
            classes=self.classes,
            slo_target=self.slo_target,
            price_per_hour=self.price_per_hour,
            cached_price=self.cached_price,
            max_num_seqs=self.ready.max_num_seqs if self.ready else 0,
            num_engines=self.engines.num,
        )

    def last_steps(self, count: int) -> list[StepRecord]:
        """Return the newest `count` records, oldest first."""
        return list(islice(reversed(self.steps), count))[::-1]

    def trace(self, seconds: float) -> dict[str, Any]:
        """Return the last `seconds` as a Chrome trace, as far as they are stored."""
        now_s = self.clock.now_s()
        timelines = [*self.finished, *self._live]
        return chrome_trace(self.steps, timelines, now_s - seconds, now_s)

    @property
    def live(self) -> list[RequestTimeline]:
        """Return the requests that are not over, oldest first."""
        return list(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)
