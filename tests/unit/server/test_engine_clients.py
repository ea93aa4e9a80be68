"""Clients of engines: what they share, and that a server does not see how many are behind one."""

import asyncio
from pathlib import Path

import pytest
import requests

from headway.core.clock import SystemClock
from headway.core.errors import EngineDownError, RequestError
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.engine.messages import Ready
from headway.frontend.answer import ResumedTokens, Stream, Streams
from headway.frontend.client import EngineClient
from headway.frontend.local import LocalClient
from headway.frontend.text import OutputParserSpec
from in_process import InProcess, fake_engine, fake_state


class Replicas:
    """Several engines in turn; ready while one of them is."""

    num_restarts = 0

    def __init__(self, clients: list[EngineClient]) -> None:
        self.clients = clients
        self.sent: list[tuple[int, int]] = []

    @property
    def status(self) -> str:
        return "ready" if self.ready else self.clients[0].status

    @property
    def ready(self) -> bool:
        return any(client.ready for client in self.clients)

    @property
    def info(self) -> Ready | None:
        return self.clients[0].info

    async def start(self) -> None:
        await asyncio.gather(*(client.start() for client in self.clients))

    async def wait_ready(self) -> None:
        await asyncio.gather(*(client.wait_ready() for client in self.clients))

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        number = request.request_id % len(self.clients)
        self.sent.append((request.request_id, number))
        return self.clients[number].submit(request, parser_spec, None, resumed_tokens)

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(client.drain(timeout_s) for client in self.clients))

    async def stop(self) -> None:
        await asyncio.gather(*(client.stop() for client in self.clients))


def test_a_server_answers_from_several_engines_as_from_one(tmp_path: Path) -> None:
    """Every prompt has an id of its own, whichever engine gets it; the answers are one engine's."""
    body = {"model": "tiny", "prompt": ["one", "two", "three"], "max_tokens": 8, "n": 2, "seed": 3}

    def texts(server: InProcess) -> list[str]:
        found = [
            requests.post(f"{server.url}/v1/completions", json=body, timeout=60) for _ in range(2)
        ]
        assert [answer.status_code for answer in found] == [200, 200], found[0].text
        return [choice["text"] for answer in found for choice in answer.json()["choices"]]

    alone = InProcess(tmp_path / "one")
    try:
        expected = texts(alone)
    finally:
        alone.close()
    state = fake_state(data_dir=str(tmp_path / "two"))
    model = state.rows[0]
    more = LocalClient(fake_engine(model.tokenizer.vocab_size), tokenizer=model.tokenizer)
    model.client = replicas = Replicas([model.client, more])
    server = InProcess(tmp_path / "two", state=state)
    try:
        assert texts(server) == expected
        assert requests.get(f"{server.url}/ready", timeout=60).json()["status"] == "ready"
    finally:
        server.close()
    assert replicas.sent == [(number, number % 2) for number in range(1, 7)]


def opened(num: int = 1, **sampling: object) -> tuple[Streams, list[Stream], list[object]]:
    """Streams with so many requests in them, and what their engine hears of."""
    heard: list[object] = []
    streams = Streams(
        None,
        lambda request_id, index: heard.append(("abort", request_id, index)),
        lambda request_id: heard.append(("left", request_id)),
    )
    asked = [Request(i, [1, 2], SamplingParams(**sampling)) for i in range(1, num + 1)]
    return streams, [streams.open(request, None) for request in asked], heard


async def test_what_is_wanted_no_more_is_aborted_once() -> None:
    """A request that is complete is over in the engine; one that runs must be told."""
    streams, (one, two), heard = opened(2)
    streams.feed([SequenceUpdate(1, 0, [5], "stop"), SequenceUpdate(2, 0, [5])])
    assert [len(await stream.next()) for stream in (one, two)] == [1, 1]
    for stream in (one, two, two):
        stream.close()
    assert heard == [("left", 1), ("left", 2), ("abort", 2, None), ("left", 2)]
    assert not streams
    streams.feed([SequenceUpdate(2, 0, [6], "stop")])  # was on its way: nobody takes it


async def test_every_stream_ends() -> None:
    """Refused, or left behind by an engine that is gone: the error comes instead of an answer."""
    streams, (one, two), heard = opened(2)
    streams.fail(1, RequestError("Too long."))
    streams.fail(7, RequestError("Nobody has asked this."))
    with pytest.raises(RequestError, match="Too long"):
        await one.next()
    await streams.wait_empty(0.0, SystemClock())
    assert list(streams) == [2]
    streams.fail_all(EngineDownError("Gone.", code="engine_died"))
    with pytest.raises(EngineDownError, match="Gone"):
        await two.next()
    assert not streams
    assert heard == [("left", 1), ("left", 7)]


async def test_an_engine_here_drains_as_one_elsewhere() -> None:
    """It takes nothing new, and what has not ended in time fails instead of waiting for ever."""
    client = LocalClient(fake_engine(100), tokenizer=None)
    running = client.submit(Request(1, [1, 2], SamplingParams(max_tokens=50)))
    await client.drain(0.0)  # it was not started: nothing moves
    with pytest.raises(EngineDownError, match="draining"):
        client.submit(Request(2, [1, 2], SamplingParams()))
    with pytest.raises(EngineDownError, match="stopped"):
        await running.next()
    await client.stop()
