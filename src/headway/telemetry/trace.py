"""Traces of steps and requests: a Chrome trace of the last seconds, and OpenTelemetry spans.

The Chrome trace (for Perfetto and chrome://tracing) has one track with the steps and their phases,
counters, and one lane for each concurrent request, in microseconds since the window began. The
spans, one per ended request with queue, prefill and decode inside, are made from finished timelines
with their own timestamps, so the hot path is not traced; they need the extra `otel`. A
request's `traceparent` header becomes the parent of its span. Prompts are in neither.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headway.core.clock import Clock
from headway.core.errors import UsageError
from headway.core.records import StepRecord
from headway.telemetry.goodput import OK
from headway.telemetry.timeline import RequestTimeline

ENGINE, REQUESTS = 1, 2
STEPS, PHASES = 1, 2
INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
Event = dict[str, Any]


def chrome_trace(
    steps: Iterable[StepRecord], timelines: Iterable[RequestTimeline], since_s: float, now_s: float
) -> dict[str, Any]:
    """Return the trace of [`since_s`, `now_s`], both on the clock of the records."""
    events = [
        metadata_event("process_name", ENGINE, 0, "engine"),
        metadata_event("thread_name", ENGINE, STEPS, "steps"),
        metadata_event("thread_name", ENGINE, PHASES, "inside a step"),
        metadata_event("process_name", REQUESTS, 0, "requests"),
    ]
    for record in steps:
        if record.started_s + record.duration_s >= since_s:
            events += step_events(record, since_s)
    for lane, timeline in lanes(timelines, since_s, now_s):
        events += request_events(timeline, lane, since_s, now_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def metadata_event(kind: str, process: int, thread: int, name: str) -> Event:
    """Return a metadata event: the name of a process or of a thread."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def complete_event(
    name: str, process: int, thread: int, start_s: float, duration_s: float, **args: Any
) -> Event:
    """Return a complete event (phase X)."""
    return {
        "ph": "X",
        "name": name,
        "cat": "headway",
        "pid": process,
        "tid": thread,
        "ts": round(start_s * 1e6, 3),
        "dur": round(max(duration_s, 0.0) * 1e6, 3),
        "args": args,
    }


def step_events(record: StepRecord, since_s: float) -> Iterator[Event]:
    """Yield the events of a step: itself, its phases in sequence, and counters at its end."""
    start_s = record.started_s - since_s
    kind = "mixed" if record.num_prefill_tokens and record.num_decode_tokens else "decode"
    if record.num_prefill_tokens and not record.num_decode_tokens:
        kind = "prefill"
    yield complete_event(
        kind if record.num_tokens else "tell",
        ENGINE,
        STEPS,
        start_s,
        record.duration_s,
        step=record.step,
        prefill_tokens=record.num_prefill_tokens,
        decode_tokens=record.num_decode_tokens,
        running=record.num_running,
        waiting=record.num_waiting,
        kv_usage=record.kv_usage,
    )
    at_s = start_s
    for name in ("schedule", "prepare", "forward", "sample"):
        duration_s = getattr(record, name + "_s")
        if duration_s:
            yield complete_event(name, ENGINE, PHASES, at_s, duration_s)
        at_s += duration_s
    executed_s = start_s + record.schedule_s + record.execute_s
    yield complete_event("update", ENGINE, PHASES, executed_s, record.update_s)
    end_us = round((start_s + record.duration_s) * 1e6, 3)
    sequences = {"running": record.num_running, "waiting": record.num_waiting}
    for name, values in (("sequences", sequences), ("KV usage", {"share": record.kv_usage})):
        yield {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": end_us, "args": values}


def lanes(
    timelines: Iterable[RequestTimeline], since_s: float, now_s: float
) -> Iterator[tuple[int, RequestTimeline]]:
    """Yield (lane, request); each request gets the lowest free lane, so none overlap."""
    free_from_s: list[float] = []
    for timeline in sorted(timelines, key=lambda t: t.arrived_s):
        end_s = timeline.ended.ended_s if timeline.ended else now_s
        if end_s < since_s:
            continue
        lane = next(
            (i for i, free_s in enumerate(free_from_s) if free_s <= timeline.arrived_s),
            len(free_from_s),
        )
        free_from_s[lane : lane + 1] = [end_s]
        yield lane, timeline


def request_events(
    timeline: RequestTimeline, lane: int, since_s: float, now_s: float
) -> Iterator[Event]:
    """Yield the events of a request and its phases; a running request ends at `now_s`."""
    end_s = timeline.ended.ended_s if timeline.ended else now_s
    yield complete_event(
        timeline.request_id,
        REQUESTS,
        lane + 1,
        timeline.arrived_s - since_s,
        end_s - timeline.arrived_s,
        service_class=timeline.service_class.name,
        outcome=timeline.ended.outcome if timeline.ended else "running",
        prompt_tokens=timeline.num_prompt,
        cached_tokens=timeline.cached_tokens,
        generated_tokens=timeline.num_generated,
        preemptions=timeline.num_preemptions,
        missed=list(timeline.ended.missed or ()) if timeline.ended else [],
    )
    for name, begin_s, stop_s in phases(timeline, end_s):
        yield complete_event(name, REQUESTS, lane + 1, begin_s - since_s, stop_s - begin_s)


def phases(timeline: RequestTimeline, end_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield (name, from, to) of queue, prefill and decode, as far as the request got."""
    scheduled_s, first_s = timeline.scheduled_s, timeline.first_s
    yield "queue", timeline.arrived_s, end_s if scheduled_s is None else scheduled_s
    if scheduled_s is not None:
        yield "prefill", scheduled_s, end_s if first_s is None else max(first_s, scheduled_s)
    if first_s is not None:
        yield "decode", max(first_s, scheduled_s or 0.0), end_s


def otlp_provider(endpoint: str, service: str) -> Any:
    """Return a provider that sends to an OTLP/HTTP collector; UsageError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError("--otlp-endpoint needs OpenTelemetry.", INSTALL) from None
    url = endpoint.rstrip("/")
    url = url if url.endswith("/v1/traces") else url + "/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


def span_writer(provider: Any, clock: Clock, model_name: str) -> Callable[[RequestTimeline], None]:
    """Return a callback that writes the spans of an ended request."""
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    tracer = provider.get_tracer("headway")

    def write(timeline: RequestTimeline) -> None:
        ended = timeline.ended
        assert ended is not None
        offset_s = clock.wall_s() - clock.now_s()

        def stamp(now_s: float) -> int:
            return int((now_s + offset_s) * 1e9)

        parent = extract({"traceparent": timeline.parent}) if timeline.parent else None
        span = tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=stamp(timeline.arrived_s),
            attributes=attributes(timeline, model_name),
        )
        if ended.outcome != OK:
            span.set_status(Status(StatusCode.ERROR, ended.outcome))
        if timeline.source is not None:  # its line in the log names the trace
            timeline.source.trace_id = f"{span.get_span_context().trace_id:032x}"
        inside = set_span_in_context(span)
        for name, begin_s, end_s in phases(timeline, ended.ended_s):
            child = tracer.start_span(name, context=inside, start_time=stamp(begin_s))
            child.end(stamp(end_s))
        span.end(stamp(ended.ended_s))

    return write


def attributes(timeline: RequestTimeline, model_name: str) -> dict[str, Any]:
    """Return span attributes: semantic conventions for generative AI, `headway.…` for the rest."""
    ended = timeline.ended
    values = {
        "gen_ai.operation.name": "generate",
        "gen_ai.request.model": model_name,
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.usage.input_tokens": timeline.num_prompt,
        "gen_ai.usage.output_tokens": timeline.num_generated,
        "gen_ai.server.time_to_first_token": timeline.ttft_s,
        "gen_ai.server.time_per_output_token": timeline.tpot_s,
        "headway.class": timeline.service_class.name,
        "headway.cached_tokens": timeline.cached_tokens,
        "headway.preemptions": timeline.num_preemptions,
        "headway.slo_missed": list(ended.missed or ()) if ended else [],
    }
    return {name: value for name, value in values.items() if value is not None}
