"""OpenTelemetry spans: one for each request, with queue, prefill and decode inside it.

Given a tracer provider it turns finished timelines into spans after the fact, with their own
timestamps, so that the hot path knows nothing of tracing. Needs the extra: `pip install
headway[otel]`. A request's `traceparent` header becomes the parent of its span.
"""

from collections.abc import Callable
from typing import Any

from headway.core.clock import Clock
from headway.core.errors import UsageError
from headway.telemetry.goodput import OK
from headway.telemetry.timeline import Timeline
from headway.telemetry.trace import phases

INSTALL = "Install the extra: pip install 'headway[otel]'."


def otlp_provider(endpoint: str, service: str) -> Any:
    """A provider that sends to an OTLP/HTTP collector; UsageError without the extra."""
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


def span_writer(provider: Any, clock: Clock, model_name: str) -> Callable[[Timeline], None]:
    """What to call with each request that is over."""
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    tracer = provider.get_tracer("headway")

    def write(timeline: Timeline) -> None:
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


def attributes(timeline: Timeline, model_name: str) -> dict[str, Any]:
    """Semantic conventions for generative AI where there is a name, ours for the rest."""
    ended = timeline.ended
    found = {
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
    return {name: value for name, value in found.items() if value is not None}
