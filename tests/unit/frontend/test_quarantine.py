"""Who is charged with an engine's death, and who goes on, where moments lie close together."""

import asyncio

import pytest

from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.engine import messages
from headway.frontend import quarantine
from headway.frontend.answer import OutputProcessor, Stream
from headway.frontend.quarantine import MAX_DEATHS_IN_ALL, TRIAL_STEPS, CrashQuarantine


class Engines:
    """A quarantine over the streams of requests that were running; it notes what is sent."""

    def __init__(self, count: int) -> None:
        self.quarantine, self.sent = CrashQuarantine(), list[int]()
        self.is_there = True
        self.streams = {n: self._stream(n) for n in range(1, count + 1)}
        self.quarantine.charge(self.streams)

    def _stream(self, request_id: int) -> Stream:
        request = Request(request_id, [request_id], SamplingParams(max_tokens=50))
        stream = Stream(OutputProcessor(request, None), lambda index: None)
        stream.was_sent = True
        return stream

    def send(self, message: messages.ToEngine) -> bool:
        if self.is_there and isinstance(message, messages.Submit):
            self.sent.append(message.request.request_id)
        return self.is_there

    async def start(self) -> None:
        """An engine is ready; returns when the first trial has begun."""
        self.sent.clear()
        self.quarantine.begin(self.streams, self.send)
        await turns()

    def step(self, request_id: int, finish_reason: str | None = None) -> None:
        """The engine tells of a step of one request."""
        self.streams[request_id].put(SequenceUpdate(request_id, 0, [5], finish_reason))
        self.quarantine.on_tokens(self.streams, {request_id})

    def deaths(self) -> dict[int, int]:
        return {number: stream.num_deaths for number, stream in self.streams.items()}


async def turns() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "TRIAL_TIMEOUT_S", 600.0)


async def test_an_engine_that_dies_as_a_trial_is_over_takes_nobody_with_it():
    """Its last messages and its death are read in one turn of the loop."""
    engines = Engines(3)
    await engines.start()
    for _ in range(TRIAL_STEPS):
        engines.step(1)
    engines.quarantine.charge(engines.streams)
    await turns()
    assert list(engines.quarantine.queue) == [2, 3], "1 has died twice; the others still wait"
    assert engines.sent == [1]
    await engines.start()
    assert engines.sent == [2]
    for _ in range(TRIAL_STEPS):
        engines.step(2)
    await turns()
    assert engines.sent == [2, 3]
    engines.quarantine.clear()


async def test_who_has_all_tokens_is_not_on_trial_any_more():
    """However slowly its client takes them, the next one begins; a death is not its own."""
    engines = Engines(2)
    await engines.start()
    engines.step(1, "length")
    engines.quarantine.charge(engines.streams)
    assert engines.deaths() == {1: 1, 2: 1}
    await engines.start()
    assert engines.sent == [2], "1 is complete"
    engines.step(2, "length")
    await turns()
    assert not engines.quarantine.trying


async def test_who_could_not_be_sent_is_not_charged():
    """Nobody took the message. The one before is charged, and goes on: it has stood its trial."""
    engines = Engines(2)
    await engines.start()
    engines.is_there = False
    for _ in range(TRIAL_STEPS):
        engines.step(1)
    await turns()
    assert not engines.quarantine.charge(engines.streams)
    assert engines.deaths() == {1: 2, 2: 1}


async def test_who_stands_every_trial_is_refused_after_many_deaths():
    """Who ends one engine after the other refuses nobody; what kills now and then is refused."""
    engines = Engines(1)
    for _ in range(MAX_DEATHS_IN_ALL - 2):
        await engines.start()
        for _ in range(TRIAL_STEPS):
            engines.step(1)
        await turns()
        assert not engines.quarantine.charge(engines.streams)
    await engines.start()
    for _ in range(TRIAL_STEPS):
        engines.step(1)
    await turns()
    guilty = engines.quarantine.charge(engines.streams)
    assert [stream.answer.request.request_id for stream in guilty] == [1]


async def test_who_was_here_before_and_comes_again_is_tried_once():
    """It went on elsewhere while nobody was here to try it, and that engine died as well."""
    engines = Engines(2)
    moved = engines.streams.pop(1)
    engines.streams[1] = moved
    engines.quarantine.join(1)
    assert list(engines.quarantine.queue) == [1, 2]
    await engines.start()
    assert engines.sent == [1]
    engines.quarantine.on_remove(1)
    engines.quarantine.join(1)  # before the trial's task has noticed
    await turns()
    engines.step(2, "stop")
    await turns()
    assert engines.sent == [1, 2, 1]
    engines.quarantine.clear()
