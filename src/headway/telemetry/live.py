"""Everything that is known of one served model while it runs, in the server's process.

The engine's client hands in step records, the server hands in requests; `/metrics`, `/stats` and
`/trace` are asked of it. A step costs it a few additions and a token two appends: percentiles,
ratios and verdicts are made from the raw values when somebody asks.
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
from headway.core.service import Alone, ServiceClass, service_classes, within_reach
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
from headway.telemetry.demand import Demand, promised_s
from headway.telemetry.engines import Engines
from headway.telemetry.goodput import FAILED, INVALID, MOVED, OK, REFUSED, Ended
from headway.telemetry.registry import Registry
from headway.telemetry.request_log import CLIENT_LEFT, RequestLog
from headway.telemetry.shared import RecentPrompts
from headway.telemetry.snapshot import WINDOWS_S, Window
from headway.telemetry.summary import Setting, window
from headway.telemetry.timeline import Timeline
from headway.telemetry.trace import chrome_trace
from headway.telemetry.windows import Slots

KEPT_STEPS, KEPT_REQUESTS = 8192, 2048
SUMMARY_SHARE = 0.01
"""At most this share of a core makes a window's figures: 5 ms of work, twice a second."""


class Probed(Protocol):
    """What the engine says after a probe."""

    ceilings: Ceilings
    alone: Alone


class Introduction(Protocol):
    """What the engine says of itself when it is ready."""

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
    alone: Alone
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
        self._default, self._alone = self.classes[DEFAULT_CLASS], Alone()
        expect_classes(self.registry, self.classes.values())
        expect_tasks(self.registry)
        self.slo_target, self.price_per_hour = slo_target, price_per_hour
        self.cached_price = cached_price
        self.started_s = self.clock.now_s()
        self.slots = Slots(self.started_s, len(spec.kv_groups))
        self.core_watch: CoreWatch | None = None
        self.cpu_watch: CpuWatch | None = None
        """Who uses the cores, and what this process does: asked once a second where set."""
        self.steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.finished: deque[Timeline] = deque(maxlen=KEPT_REQUESTS)
        self.on_finish: Callable[[Timeline], None] = lambda timeline: None
        """Told of each request that is over, for traces."""
        self.request_log: RequestLog | None = None
        """Writes a line for each, where somebody set it."""
        self.on_record: Callable[[StepRecord], None] = lambda record: None
        """Told of each step, for admission."""
        self.on_introduced: Callable[[int, Introduction], None] = lambda engine, ready: None
        """Told of each engine that begins, for admission."""
        self.on_gone: Callable[[int], None] = lambda engine: None
        """Told of each engine that has died, for admission."""
        self.ready: Introduction | None = None
        self.roof, self.work = Roof(Ceilings()), ModelWork(spec, spec.dtype)
        self._live: dict[Timeline, list[int]] = {}  # with its numbers in the engine
        self._by_engine: dict[int, Timeline] = {}
        self.prompts = RecentPrompts(self.clock)
        self.engines = Engines(Demand(self.clock, lambda: promised_s(self.classes)))
        self._windows: dict[int, tuple[float, Window]] = {}
        self._counted: dict[str, int] = {}
        self._counted_first, self._counted_work = 0, (0.0, 0.0)
        self.num_requests = self.num_missed = 0
        self.errors: dict[str, int] = {}
        """Refused and failed requests by code."""

    # ── what the engine tells ───────────────────────────────────────────────────────────────

    def on_ready(self, ready: Introduction, engine: int = 0) -> None:
        """An engine takes requests, for the first time or again."""
        self.ready = ready
        self._take_pace(ready.alone)
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
        if self.sources:
            expect_drafts(self.registry, self.sources, int(ready.settings["max_drafts"]))
        self.engines.ready.add(engine)
        self.on_introduced(engine, ready)

    def on_probe(self, probed: Probed) -> None:
        """The runtime measured the machine again, and the steps told what one request takes."""
        self._take_pace(probed.alone)
        self.turn()
        self.slots.current.probe_shares.append(probed.ceilings.last_share)
        self.roof.take(probed.ceilings)

    def _take_pace(self, alone: Alone) -> None:
        """Promise by default what this machine can keep at its best: others on its cores at the
        start raise the objectives only until a quieter moment shows a shorter time."""
        self._alone = self._alone.at_best(alone)
        self.classes[DEFAULT_CLASS] = within_reach(self._default, self._alone)

    def on_step(self, record: StepRecord) -> None:
        """Take one step record."""
        self.turn()
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
                timeline.prefill_s = self.clock.now_s()
        if num_preemptions:
            self._note_preemptions(record, num_preemptions)

    def _note_preemptions(self, record: StepRecord, new: int) -> None:
        count_preemptions(self.registry, record, new)
        self.slots.current.num_preemptions += new
        for request_id, num_made in record.preempted:
            timeline = self._by_engine.get(request_id)
            if timeline is not None:
                timeline.preempted(num_made)

    def on_death(self, engine: int = 0) -> None:
        """An engine is gone."""
        self.engines.on_death(engine)
        self.on_gone(engine)

    # ── what the server tells ───────────────────────────────────────────────────────────────

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
    ) -> Timeline:
        """A request has arrived and is about to be sent to the engine."""
        self.turn()
        self.slots.current.arrivals += 1
        self.num_requests += 1
        timeline = Timeline(
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

    def submitted(self, timeline: Timeline, engine_request_id: int) -> None:
        """One of its prompts goes under this number in the engine."""
        self._by_engine[engine_request_id] = timeline
        self._live[timeline].append(engine_request_id)

    def on_first_token(self, timeline: Timeline) -> None:
        """The request's first token left."""
        self.slots.current.prompt_tokens += timeline.num_prompt
        self.registry.add("prompt_tokens", timeline.num_prompt)
        self.registry.observe("time_to_first_token_seconds", timeline.ttft_s)

    def on_end(self, timeline: Timeline, ended: Ended) -> None:
        """The request is over."""
        self.turn()
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
            self.request_log.ended(timeline, ended)
        timeline.error = None  # its traceback holds the request's body and prompts

    def _count_slo(self, ended: Ended) -> None:
        count_slo(self.registry, ended)
        self.num_missed += bool(ended.missed)

    def called(self, fits: bool) -> None:
        """An answer held a tool call; its arguments fit the tool's parameters, or do not."""
        self.registry.add("tool_calls")
        if not fits:
            self.registry.add("validation_failures", 1, "tool_arguments")

    def sequence_finished(self, reason: str) -> None:
        """A sequence ended."""
        self.registry.add("request_success", 1, reason)

    def answer_invalid(self, kind: str) -> None:
        """An answer, or the arguments of a tool call, does not validate: {"json": 1}."""
        self.registry.add("validation_failures", 1, kind)

    def refused(
        self,
        error: RequestError,
        timeline: Timeline | None = None,
        service_class: str = DEFAULT_CLASS,
        source: RequestSource | None = None,
    ) -> None:
        """A request was refused before it ran: for its body, or for load or state."""
        code = error.code or "unknown"
        self.errors[code] = self.errors.get(code, 0) + 1
        outcome = INVALID
        if error.status in (429, 503):
            outcome = REFUSED
            self.registry.add("admission_rejections", 1, error.reason or code)
        elif error.status in (400, 413) and code != CLIENT_LEFT:
            self.registry.add("validation_failures", 1, "request")
            if error.reason is not None:
                self.registry.add("admission_rejections", 1, error.reason)
        if timeline is not None:
            timeline.error = error
            timeline.end(outcome)
            return
        if self.request_log is not None and code != CLIENT_LEFT:
            self.request_log.refused(error, outcome, service_class, source)
        if outcome == REFUSED:
            self._refused_at_the_door(service_class)

    def _refused_at_the_door(self, service_class: str) -> None:
        """A request without a timeline was refused for load or state: a miss of its class."""
        self.turn()
        ended = Ended(
            service_class=service_class,
            outcome=REFUSED,
            ended_s=self.clock.now_s(),
            prompt_tokens=0,
            output_tokens=0,
            missed=(REFUSED,),
        )
        self.slots.current.ended.append(ended)
        self._count_slo(ended)

    def failed(self, timeline: Timeline, error: RequestError) -> None:
        """A request that was let in ended with `error`; 4xx and shed are refusals of it."""
        if error.status < 500 or isinstance(error, ShedError):
            self.refused(error, timeline)
            return
        code = error.code or "unknown"
        self.errors[code] = self.errors.get(code, 0) + 1
        timeline.error = error
        timeline.end(FAILED)

    def turn(self) -> None:
        """Begin a new slot when a second has begun; the tokens of the old one are all counted."""
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
        """Bring the token metrics up to date: once a second, and when they are asked for."""
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

    # ── what is asked ───────────────────────────────────────────────────────────────────────

    @property
    def usd(self) -> float:
        """What the server has cost since it started."""
        return (self.price_per_hour or 0.0) * (self.clock.now_s() - self.started_s) / 3600

    def render(self) -> bytes:
        """What `/metrics` serves."""
        self.turn()
        self.count_tokens()
        registry, last = self.registry, self.engines.last
        registry.show_steps(self.engines.last_steps)
        capacity = last.num_waiting - last.num_deferred
        registry.set("num_requests_waiting_by_reason", last.num_deferred, "deferred")
        registry.set("num_requests_waiting_by_reason", capacity, "capacity")
        show_engines(registry, self.engines.num_by_role, self.engines.demand.asked)
        registry.set("cost_usd", self.usd)
        held = self.engines.tier_bytes
        registry.values["kv_tier_bytes"] = {(tier,): float(size) for tier, size in held.items()}
        show_window(registry, self.window(WINDOWS_S[0]))
        return registry.render()

    def window(self, seconds: int) -> Window:
        """The figures of the last `seconds`; under load those of a moment ago."""
        now_s = self.clock.now_s()
        fresh_until_s, made = self._windows.get(seconds, (now_s, None))
        if made is None or now_s >= fresh_until_s:
            slots, covered_s = self.slots.last(seconds, now_s)
            made = window(seconds, slots, covered_s, self._setting())
            spent_s = self.clock.now_s() - now_s
            self._windows[seconds] = now_s + spent_s / SUMMARY_SHARE, made
        return made

    @property
    def sources(self) -> tuple[str, ...]:
        """Who guesses tokens; empty where nobody does."""
        told = self.ready.settings.get("speculate", "off") if self.ready else "off"
        return () if told == "off" else tuple(told.split(","))

    def _setting(self) -> Setting:
        return Setting(
            sources=self.sources,
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
        """The newest `count` records, oldest first."""
        return list(islice(reversed(self.steps), count))[::-1]

    def trace(self, seconds: float) -> dict[str, Any]:
        """The last `seconds` as a Chrome trace, as far as they are kept."""
        now_s = self.clock.now_s()
        timelines = [*self.finished, *self._live]
        return chrome_trace(self.steps, timelines, now_s - seconds, now_s)

    @property
    def live(self) -> list[Timeline]:
        """The requests that are not over, oldest first."""
        return list(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)
