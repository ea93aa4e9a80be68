"""What the engine's process does with a message: also with one that it cannot read."""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from headway.config.options import Seconds
from headway.core import grammar as grammars
from headway.core.clock import VirtualClock
from headway.core.request import Request, SamplingParams
from headway.core.terms import Terms
from headway.engine import messages, process
from headway.engine.calibration import unloaded_times
from headway.engine.process import handle_message
from in_process import fake_engine


class Pair:
    """One end of the two processes' socket: what comes in, and what was sent."""

    def __init__(self, frame: bytes) -> None:
        self.frame, self.sent = frame, list[Any]()

    def recv(self) -> bytes:
        return self.frame

    def send(self, frame: bytes) -> None:
        self.sent.append(messages.decode_from_engine(frame))


def taken(frame: bytes) -> list[Any]:
    """What an engine says to this frame; it goes on afterwards."""
    engine, pair = fake_engine(64), Pair(frame)
    assert handle_message(engine, pair)  # type: ignore[arg-type]
    assert engine.num_requests == 0
    engine.check_integrity()
    return pair.sent


def test_a_request_that_contradicts_itself_is_refused() -> None:
    """Parameters are checked when they are made; one that was changed later is found here."""
    sampling = SamplingParams(min_tokens=1)
    sampling.grammar = grammars.regex("a", "tools")
    (told,) = taken(messages.encode(messages.Submit(Request(7, [1], sampling))))
    assert (told.request_id, told.param, told.status) == (7, "min_tokens", 400)


def test_numbers_with_a_unit_are_sent_as_numbers() -> None:
    """Terms may hold what an option says: `--max-queue-wait` of a best-effort request."""
    request = Request(7, [1], SamplingParams(), terms=Terms(ttft_s=Seconds(600)))
    frame = messages.encode(messages.Submit(request))
    told = messages.decode_to_engine(frame)
    assert isinstance(told, messages.Submit)
    assert told.request.terms.ttft_s == 600 and type(told.request.terms.ttft_s) is float


@pytest.mark.parametrize("rest", [[], ["no ids"], [[1], {"n": "x"}], [[1], None, None]])
def test_a_request_that_cannot_be_read_is_a_fault(rest: list[Any]) -> None:
    (told,) = taken(msgspec.msgpack.encode([1, [7, *rest]]))
    assert told == messages.Rejection(7, "", None, messages.FAULT)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"no message", msgspec.msgpack.encode([1, "x"])])
def test_what_is_no_message_is_dropped(frame: bytes) -> None:
    assert taken(frame) == []


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bell of the loop under test, closed behind it: else the process does that."""
    bell = process.Bell()
    monkeypatch.setattr(process, "Bell", lambda: bell)
    yield
    bell.listener.close()
    bell._ringer.close()


def test_a_step_that_computes_nothing_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks twice a second: a step that computes slowly, then is held; a machine that slept."""
    pulse, clock, computed = process.LoopProgress(), VirtualClock(), [0.0]
    pulse._clock, pulse._clocks = clock, [1]
    monkeypatch.setattr(process.time, "clock_gettime", lambda _: computed[0])

    def look(computes_s: float, later_s: float = 0.5) -> tuple[float, ...]:
        computed[0] += computes_s
        clock.advance(later_s)
        told = pulse.beat()
        return told.busy_s, told.still_s, round(told.computed_s, 4)

    with pulse:
        assert look(0.25) == (0.5, 0, 0), "of its first look nobody knows what it has computed"
        assert [look(0.25) for _ in range(2)] == [(1.0, 0, 0.25), (1.5, 0, 0.5)]
        assert [look(0.0001) for _ in range(2)] == [(2.0, 0.5, 0.5001), (2.5, 1.0, 0.5002)]
        assert look(0, 60.0) == (62.5, 2.0, 0.5002)
        assert look(0.1) == (63.0, 0, 0.6002)
    assert look(0) == look(0) == (0, 0, 0)
    with pulse:
        assert look(0.1)[1:] == (0, 0)
        assert look(0)[1:] == (0.5, 0)
    with pulse:
        assert look(0)[1:] == (0, 0), "another step"
    engine = fake_engine(64)
    engine.settings = dataclasses.replace(engine.settings, device="cuda")
    pulse.watch(engine)
    with pulse:
        assert look(0) == (0.5, 0, 0.5)
    assert pulse.longest_s == 63.0


def test_a_step_that_another_rank_computes_is_not_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread sleeps while it waits for processes 7 and 8; then one ends, one is held."""
    used = {1: 5.0, process.clock_of(7): 0.0, process.clock_of(8): 0.0}
    pulse, clock = process.LoopProgress(), VirtualClock()
    pulse._clock, pulse._clocks = clock, [1]
    engine = fake_engine(64)
    monkeypatch.setattr(engine.executor, "awaited", [7, 8], raising=False)
    pulse.watch(engine)

    def read(number: int) -> float:
        if number not in used:
            raise OSError("no such process")
        return used[number]

    monkeypatch.setattr(process.time, "clock_gettime", read)

    def look(*, seven_s: float = 0.0, eight_s: float = 0.0) -> tuple[float, float]:
        used[process.clock_of(7)] += seven_s
        used[process.clock_of(8)] += eight_s
        clock.advance(0.5)
        told = pulse.beat()
        return told.still_s, round(told.computed_s, 4)

    with pulse:
        assert look() == (0, 0)
        assert look(seven_s=0.2) == (0, 0.2)
        assert look(seven_s=0.1, eight_s=0.4) == (0, 0.4), "the most of them, not all together"
        assert look(eight_s=0.0001) == (0.5, 0.4001)
        used[process.clock_of(9)] = used.pop(process.clock_of(7))
        clock.advance(0.5)
        told = pulse.beat()
        assert (told.still_s, round(told.computed_s, 4)) == (1.0, 0.4001)


@pytest.mark.skipif(sys.platform != "linux", reason="clocks are numbered so by Linux")
def test_the_clock_of_a_process_is_the_systems() -> None:
    before_s = process.processor_s(process.clock_of(os.getpid()))
    until_s = time.process_time() + 0.02
    while time.process_time() < until_s:
        pass
    assert process.processor_s(process.clock_of(os.getpid())) - before_s >= 0.015


@pytest.mark.usefixtures("bell")
def test_an_idle_engine_tells_what_its_steps_have_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ceilings of its probe goes what one request takes, as the last steps had it."""
    monkeypatch.setattr(process, "IDLE_PROBE_INTERVAL_S", 0.0)
    engine, context = fake_engine(64), zmq.Context.instance()
    with context.socket(zmq.PAIR) as server, context.socket(zmq.PAIR) as pair:
        server.rcvtimeo = 20_000
        server.bind("inproc://idle-engine")
        pair.connect("inproc://idle-engine")
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        server.send(messages.encode(messages.Submit(Request(1, [1, 2, 3], sampling))))
        loop = threading.Thread(target=process.run, args=(engine, pair, process.LoopProgress()))
        loop.start()
        told = messages.decode_from_engine(server.recv())
        while not isinstance(told, messages.ProbeResult):
            told = messages.decode_from_engine(server.recv())
        server.send(messages.encode(messages.Stop()))
        loop.join(20)
    assert told.alone == unloaded_times(engine) and told.alone.num_tokens == 256


class Script:
    """Stands for the poller and for the socket: a request is there when it is asked for one, or
    nothing comes for as long as the poller waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *coming: Request | None) -> None:
        self.coming, self.seen = list(coming), list[str]()
        self.engine = fake_engine(64)
        monkeypatch.setattr(self.engine, "check_integrity", self.check)
        monkeypatch.setattr(process.zmq, "Poller", lambda: self)
        process.run(self.engine, self, process.LoopProgress())  # type: ignore[arg-type]

    def check(self) -> None:
        type(self.engine).check_integrity(self.engine)
        self.seen.append("check")
        time.sleep(0.1)  # so for ten seconds none besides

    def register(self, *_: object) -> None:
        pass

    def poll(self, wait_ms: int) -> list[tuple[object, int]]:
        if self.engine.has_work:
            assert wait_ms == 0
            return []
        if self.coming and self.coming[0] is None:
            self.seen.append("silence")
            self.coming.pop(0)
            return []
        return [(self, zmq.POLLIN)]

    def recv(self) -> bytes:
        if not self.coming:
            return messages.encode(messages.Stop())
        request = self.coming.pop(0)
        assert request is not None
        self.seen.append(f"request {request.request_id}")
        return messages.encode(messages.Submit(request))

    def send(self, frame: bytes) -> None:
        pass


@pytest.mark.usefixtures("bell")
def test_an_engine_is_checked_in_silence_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a check who comes as soon as the engine has nothing to do."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    one, two, three = [Request(number, [1, 2, 3], sampling) for number in (1, 2, 3)]
    script = Script(monkeypatch, None, one, two, None, None, three, None)
    assert script.seen == [
        *("silence", "request 1", "request 2", "silence", "check", "silence"),
        *("request 3", "silence"),
    ]
