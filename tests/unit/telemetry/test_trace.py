"""The Chrome trace and the OpenTelemetry spans of a made-up minute."""

import json

import pytest

from headway.core.clock import VirtualClock
from headway.telemetry.trace import span_writer
from telemetry_cases import answer, begin, step, telemetry


def minute():
    """Two requests that overlap and one that still runs, with steps below them."""
    clock = VirtualClock(now_s=100.0)
    model = telemetry(clock)
    first = begin(model, "a")
    first.on_scheduled(100.1, 0)
    for number in range(20):
        clock.advance(0.05)
        model.on_step(step(number, started_s=clock.now_s() - 0.01, num_tokens=4 + number % 2))
        first.add_tokens(0, 1)
    answer(model, clock, "b", [0.2, 0.1])
    first.complete()
    begin(model, "c")
    clock.advance(0.5)
    return model, clock


def test_the_shape_of_trace_events():
    model, _ = minute()
    trace = json.loads(json.dumps(model.trace(60)))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
    names = {event["name"] for event in events}
    assert {"decode", "mixed", "forward", "schedule", "update", "queue", "prefill", "a"} <= names
    steps = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 1)]
    assert len(steps) == 20 and steps[0]["args"]["step"] == 0
    assert steps[0]["ts"] == pytest.approx((100.04 - (101.8 - 60)) * 1e6, abs=1)


def test_requests_that_overlap_lie_in_different_lanes():
    model, _ = minute()
    events = [e for e in model.trace(60)["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    lanes = {e["name"]: e["tid"] for e in events if e["name"] in "abc"}
    assert lanes["a"] != lanes["b"] and lanes["c"] in (lanes["a"], lanes["b"])
    whole = {e["name"]: e for e in events if e["name"] in "abc"}
    assert whole["c"]["args"]["outcome"] == "running"
    for event in events:  # children lie inside their request
        middle = event["ts"] + event["dur"] / 2
        parent = next(
            w for w in whole.values()
            if w["tid"] == event["tid"] and w["ts"] <= middle <= w["ts"] + w["dur"]
        )  # fmt: skip
        assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"] + 1


def test_a_short_window_holds_the_end_only():
    model, _ = minute()
    names = [e["name"] for e in model.trace(0.6)["traceEvents"] if e["ph"] == "X"]
    assert "c" in names and "decode" not in [
        e["name"] for e in model.trace(0.6)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1
    ]


def test_spans():
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=100ms"])
    model.on_finish = span_writer(provider, clock, "made-up")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    began_s = clock.wall_s()
    answer(model, clock, "a", [0.4, 0.1], parent=parent)
    spans = {span.name: span for span in kept.get_finished_spans()}
    request = spans["llm_request"]
    assert f"{request.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes["gen_ai.usage.output_tokens"] == 2
    assert request.attributes["headway.slo_missed"] == ("ttft",)
    spent = {name: (s.end_time - s.start_time) / 1e9 for name, s in spans.items()}
    assert spent == pytest.approx(
        {"llm_request": 0.5, "queue": 0.2, "prefill": 0.2, "decode": 0.1}, abs=1e-6
    )
    assert request.start_time / 1e9 == pytest.approx(began_s, abs=1e-3)
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == request.context.span_id
    begin(model, "b").fail()
    failed = kept.get_finished_spans()[-1]
    assert failed.name == "llm_request" and not failed.status.is_ok


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch):
    import sys

    from headway.core.errors import UsageError
    from headway.telemetry.trace import otlp_provider

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError) as error:
        otlp_provider("http://127.0.0.1:4318", "headway")
    assert "pip install opentelemetry-sdk" in error.value.fix
