"""A line for each request and one a minute: what is in it, what is always told, what is escaped."""

import logging
import os
import threading
from datetime import datetime

import msgspec
import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import EngineDownError, RequestError, ServerFaultError
from headway.core.logs import FORMATTERS, write_in_thread
from headway.core.request_source import RequestSource
from headway.telemetry.request_log import RequestLog, log_minute
from telemetry_cases import answer, begin, step, telemetry

FORGED = "x\n2026-11-21 10:00:00,000 ERROR headway root logged in\x1b[2J\u202e"


@pytest.fixture
def lines(caplog):
    """The lines logged so far, as text."""
    caplog.set_level(logging.DEBUG, logger="headway.requests")
    return lambda: [record.getMessage() for record in caplog.records]


def logged(**more):
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms,tpot=50ms"])
    model.request_log = RequestLog(**more)
    return clock, model


def test_a_line_for_each_request(lines, caplog):
    clock, model = logged()
    answer(model, clock, "chatcmpl-1", [0.3] + [0.04] * 5)
    answer(model, clock, "chatcmpl-2", [0.8] + [0.0611] * 5)
    assert lines() == [
        "chatcmpl-1 200 default 10+6 tokens, 0 cached, queue 150 ms, TTFT 300 ms, TPOT 40 ms, "
        "in all 500 ms, met",
        "chatcmpl-2 200 default 10+6 tokens, 0 cached, queue 400 ms, TTFT 800 ms, TPOT 61.1 ms, "
        "in all 1.11 s, missed ttft and tpot",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_what_was_refused_left_or_moved_on(lines):
    clock, model = logged()
    model.on_rejection(EngineDownError("full"))
    model.on_rejection(RequestError("no", code="invalid_value"))
    model.on_rejection(RequestError("late", status=429, reason="queue_seconds"), begin(model, "a"))
    timeline = begin(model, "b")
    clock.advance(2)
    timeline.disconnect()
    begin(model, "c").move()
    assert lines() == [
        "- 503 default 0+0 tokens, 0 cached, refused: overloaded",
        "- 400 default 0+0 tokens, 0 cached, invalid: invalid_value",
        "a 429 default 10+0 tokens, 0 cached, in all 0 ms, refused",
        "b 499 default 10+0 tokens, 0 cached, in all 2.00 s, left",
    ]


def test_a_line_says_where_its_request_comes_from(lines, caplog):
    clock, model = logged()
    source = RequestSource(
        request_id="5f3a", path="/v1/completions", key="alice", client_request_id="job-7"
    )
    answer(model, clock, "cmpl-5f3a", [0.3], source=source)
    assert lines()[-1].endswith(", met; POST /v1/completions, key alice, client job-7")
    model.on_rejection(RequestError("no", code="invalid_value"), source=source)
    assert lines()[-1] == (
        "5f3a 400 default 0+0 tokens, 0 cached, invalid: invalid_value; "
        "POST /v1/completions, key alice, client job-7"
    )
    found = msgspec.json.decode(FORMATTERS["json"]().format(caplog.records[0]))
    assert datetime.fromisoformat(found["time"]).tzinfo is not None
    assert found["request"] | {"request_id": "5f3a", "key": "alice"} == found["request"]


def test_a_client_cannot_say_that_it_has_a_key(lines):
    """What it calls itself, and the path, are words or in quotes; a method has a length."""
    _, model = logged()
    source = RequestSource(
        request_id="1",
        method="M" * 60_000,
        path='/v1/x, key bob"',
        client_request_id="x, key alice",
    )
    model.on_rejection(RequestError("no", code="invalid_api_key", status=401), source=source)
    (line,) = lines()
    assert line.endswith('; MMMMMMMMMMMMMMMMMMMM "/v1/x, key bob\\"", client "x, key alice"')
    assert source.fields()["method"] == "M" * 20


def test_a_request_has_one_line(lines):
    clock, model = logged()
    source = RequestSource(request_id="1", path="/v1/completions")
    answer(model, clock, "cmpl-1", [0.3], source=source)
    model.request_log.log_error_answer(ServerFaultError(), source)
    assert len(lines()) == 1
    model.request_log.log_error_answer(ServerFaultError(), RequestSource(request_id="2"))
    assert len(lines()) == 2


def test_our_own_faults_are_told_always(lines, caplog):
    clock, model = logged(every=False)
    answer(model, clock, "fine", [0.1])
    model.on_rejection(RequestError("no", code="invalid_value"))
    model.on_failure(begin(model, "broken"), ServerFaultError())
    assert lines() == [
        "broken 500 default 10+0 tokens, 0 cached, in all 0 ms, failed: internal_error"
    ]
    assert caplog.records[0].levelname == "ERROR"


def test_a_quiet_level_makes_no_line(lines, caplog):
    caplog.set_level(logging.WARNING, logger="headway.requests")
    clock, model = logged()
    answer(model, clock, "fine", [0.1])
    model.on_failure(begin(model, "broken"), ServerFaultError())
    assert len(lines()) == 1 and lines()[0].startswith("broken")


@pytest.mark.parametrize("format", FORMATTERS)
def test_an_id_cannot_write_lines_of_its_own(lines, caplog, format):
    """Ids are a client's where it sends x-request-id."""
    clock, model = logged()
    answer(model, clock, FORGED, [0.1])
    (record,) = caplog.records
    line = FORMATTERS[format]().format(record)
    assert len(line.splitlines()) == 1 and not set(line) & {"\x1b", "\u202e", "\n"}
    if format == "json":
        found = msgspec.json.decode(line)["request"]
        assert found["ttft_s"] == pytest.approx(0.1) and found["prompt_tokens"] == 10
        assert found["class"] == "default" and "\n" not in found["id"]


def test_a_minute_with_work_has_a_line_and_one_without_has_none(lines):
    clock, model = logged()
    log_minute(model)
    assert lines() == []
    for number in range(30):
        model.on_step(step(number, num_running=3, num_waiting=1))
        answer(model, clock, f"r{number}", [0.3] + [0.04] * 5)
    log_minute(model)
    assert lines()[-1].startswith(
        "made-up, last minute: 2 requests/s ended, 0 failed or refused; 3 run, 1 wait; "
    )
    assert "TTFT p50 300 ms p95 300 ms; TPOT p50 40 ms" in lines()[-1]
    assert "100% met their objectives; KV 28%" in lines()[-1]
    clock.advance(300)
    before = len(lines())
    log_minute(model)
    assert len(lines()) == before
    begin(model, "still here")
    clock.advance(120)
    log_minute(model)
    assert len(lines()) == before + 1


def test_a_terminal_that_stands_still_holds_up_nobody(monkeypatch):
    """Nobody reads the pipe: more lines than it holds are logged at once, and leaving ends."""
    read, write = os.pipe()
    monkeypatch.setattr("headway.core.logs.MAX_LINES_WAITING", 100)
    before = set(threading.enumerate())
    with open(write, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        done = threading.Event()

        def log_much() -> None:
            with write_in_thread("headway.requests", "text"):
                log = logging.getLogger("headway.requests")
                log.setLevel(logging.INFO)
                for _ in range(5000):
                    log.info("%s", "x" * 1000)
            done.set()

        thread = threading.Thread(target=log_much, daemon=True)
        thread.start()
        assert done.wait(30), "a line waited for its reader"
        head = os.read(read, 60)
        assert b"INFO headway.requests xxx" in head
        os.close(read)  # the writer's thread ends with errors that it passes over
        for thread in set(threading.enumerate()) - before:
            thread.join(30)  # else it would write to whoever gets this descriptor next
        logging.getLogger("headway.requests").setLevel(logging.NOTSET)


def test_lines_are_written_before_the_end(monkeypatch):
    read, write = os.pipe()
    with open(write, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with write_in_thread("headway.requests", "json"):
            log = logging.getLogger("headway.requests")
            log.setLevel(logging.INFO)
            for number in range(5):
                log.info("line %d", number)
        log.setLevel(logging.NOTSET)
    with open(read) as file:
        assert [msgspec.json.decode(line)["message"] for line in file] == [
            f"line {number}" for number in range(5)
        ]
