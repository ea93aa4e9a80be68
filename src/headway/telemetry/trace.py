"""The last seconds as a Chrome trace, which Perfetto and chrome://tracing open.

Given step records and request timelines it returns trace events: one track with the steps and what
they spent their time on, counters, and one lane for each request that runs beside others. Times are
microseconds since the window began; there are no prompts in it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from headway.core.records import StepRecord
from headway.telemetry.timeline import Timeline

ENGINE, REQUESTS = 1, 2
STEPS, PHASES = 1, 2
Event = dict[str, Any]


def chrome_trace(
    steps: Iterable[StepRecord], timelines: Iterable[Timeline], since_s: float, now_s: float
) -> dict[str, Any]:
    """The trace of [`since_s`, `now_s`], both on the clock of the records."""
    events = [
        named("process_name", ENGINE, 0, "engine"),
        named("thread_name", ENGINE, STEPS, "steps"),
        named("thread_name", ENGINE, PHASES, "inside a step"),
        named("process_name", REQUESTS, 0, "requests"),
    ]
    for record in steps:
        if record.started_s + record.duration_s >= since_s:
            events += step_events(record, since_s)
    for lane, timeline in lanes(timelines, since_s, now_s):
        events += request_events(timeline, lane, since_s, now_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def named(kind: str, process: int, thread: int, name: str) -> Event:
    """A metadata event: the name of a process or of a thread."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def span(
    name: str, process: int, thread: int, start_s: float, duration_s: float, **args: Any
) -> Event:
    """A complete event."""
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
    """The step, its phases one after the other, and the counters behind it."""
    start_s = record.started_s - since_s
    kind = "mixed" if record.num_prefill_tokens and record.num_decode_tokens else "decode"
    if record.num_prefill_tokens and not record.num_decode_tokens:
        kind = "prefill"
    yield span(
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
            yield span(name, ENGINE, PHASES, at_s, duration_s)
        at_s += duration_s
    executed_s = start_s + record.schedule_s + record.execute_s
    yield span("update", ENGINE, PHASES, executed_s, record.update_s)
    end_us = round((start_s + record.duration_s) * 1e6, 3)
    sequences = {"running": record.num_running, "waiting": record.num_waiting}
    for name, values in (("sequences", sequences), ("KV usage", {"share": record.kv_usage})):
        yield {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": end_us, "args": values}


def lanes(
    timelines: Iterable[Timeline], since_s: float, now_s: float
) -> Iterator[tuple[int, Timeline]]:
    """(lane, request) so that no two requests of a lane overlap: the lowest that is free."""
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


def request_events(timeline: Timeline, lane: int, since_s: float, now_s: float) -> Iterator[Event]:
    """The request, and queue, prefill and decode inside it; one that still runs ends now."""
    end_s = timeline.ended.ended_s if timeline.ended else now_s
    yield span(
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
        yield span(name, REQUESTS, lane + 1, begin_s - since_s, stop_s - begin_s)


def phases(timeline: Timeline, end_s: float) -> Iterator[tuple[str, float, float]]:
    """(name, from, to) of queue, prefill and decode, as far as the request got."""
    scheduled_s, first_s = timeline.scheduled_s, timeline.first_s
    yield "queue", timeline.arrived_s, end_s if scheduled_s is None else scheduled_s
    if scheduled_s is not None:
        yield "prefill", scheduled_s, end_s if first_s is None else max(first_s, scheduled_s)
    if first_s is not None:
        yield "decode", max(first_s, scheduled_s or 0.0), end_s
