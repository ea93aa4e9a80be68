"""A fallback that means harm: bounded in time and bytes, our key goes nowhere else, nobody fails.

It speaks HTTP by hand, in a thread of its own. Limits are small here; what is shown is that they
hold, and that the client has the refusal that it would have had without a fallback.
"""

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import requests

from fallback_cases import EVENTS, Full
from headway.edge import upstream
from headway.edge.upstream import FallbackUpstream
from in_process import InProcess

MODELS = b'{"data": [{"id": "big"}]}'
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
Answer = Callable[["Hostile", asyncio.StreamWriter], Awaitable[None]]


def json_answer(body: bytes, *headers: bytes) -> bytes:
    more = b"".join(header + b"\r\n" for header in headers)
    return JSON + more + b"content-length: %d\r\n\r\n" % len(body) + body


class Hostile:
    """What it does with a request for an answer, and with one for its models."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.num_sent = 0
        self.answers: Answer
        self.models = MODELS
        self.url = ""

    async def serve(self, started: threading.Event, end: threading.Event) -> None:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        started.set()
        async with server:
            while not end.is_set():
                await asyncio.sleep(0.01)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung_up = OSError, asyncio.IncompleteReadError  # our server, which has had enough
        with contextlib.suppress(*hung_up), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if head.startswith(b"GET"):
                writer.write(
                    json_answer(self.models, b"set-cookie: a=tracked", b"connection: close")
                )
            else:
                await self.answers(self, writer)
            await writer.drain()

    async def send(self, writer: asyncio.StreamWriter, data: bytes, pause_s: float = 0.0) -> None:
        writer.write(data)
        self.num_sent += len(data)
        await writer.drain()
        await asyncio.sleep(pause_s)


# ── what it does ────────────────────────────────────────────────────────────────────────────


def says(data: bytes) -> Answer:
    """It answers once, with these bytes."""

    async def answer(hostile: Hostile, writer: asyncio.StreamWriter) -> None:
        await hostile.send(writer, data)

    return answer


def repeats(first: bytes, again: bytes, pause_s: float = 0.0) -> Answer:
    """It begins and never ends."""

    async def answer(hostile: Hostile, writer: asyncio.StreamWriter) -> None:
        await hostile.send(writer, first)
        while True:
            await hostile.send(writer, again, pause_s)

    return answer


def redirects(status: int) -> Answer:
    async def answer(hostile: Hostile, writer: asyncio.StreamWriter) -> None:
        place = hostile.url.replace("127.0.0.1", "localhost") + "/metadata"
        head = f"HTTP/1.1 {status} Elsewhere\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n"
        await hostile.send(writer, head.encode())

    return answer


async def nothing(hostile: Hostile, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(600)


SLOW = ("never answers", "never answers a stream", "slow headers", "slow body")
"""What ends by our time limit alone; all else ends by itself or by its bytes."""
BOMB = gzip.compress(b'{"a": "' + bytes(20_000_000) + b'"}')
REFUSED: dict[str, tuple[Answer, bool]] = {
    "redirect to another place": (redirects(302), False),
    "redirect that keeps method and body": (redirects(307), False),
    "redirect of a stream": (redirects(308), True),
    "never answers": (nothing, False),
    "never answers a stream": (nothing, True),
    "endless headers": (repeats(JSON, b"x-more: " + b"y" * 1000 + b"\r\n"), False),
    "one endless header": (repeats(JSON + b"x-more: ", b"y" * 10_000), False),
    "slow headers": (repeats(JSON + b"x-more: ", b"y", 0.02), True),
    "endless body": (repeats(JSON + b"connection: close\r\n\r\n", b'"' * 100_000), False),
    "body that claims a terabyte": (
        repeats(JSON + b"content-length: 1000000000000\r\n\r\n", b"[" * 100_000),
        False,
    ),
    "slow body": (repeats(JSON + b"content-length: 1000\r\n\r\n", b" ", 0.02), False),
    "cut body": (says(JSON + b"content-length: 1000\r\n\r\n{}"), False),
    "bad JSON": (says(json_answer(b'{"choices": [')), False),
    "no object": (says(json_answer(b"[1]")), False),
    "deep JSON": (says(json_answer(b"[" * 100_000)), False),
    "gzip bomb": (says(json_answer(BOMB, b"content-encoding: gzip")), False),
    "a page": (says(json_answer(b"<script>").replace(b"application/json", b"text/html")), False),
    "a stream not asked for": (says(SSE + EVENTS[1]), False),
    "no stream where one is asked for": (says(json_answer(b"{}")), True),
    "not HTTP": (says(b"\x00" * 1000), False),
    "chunks of no size": (says(JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n"), False),
}


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    made, started, end = Hostile(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(made.serve(started, end)))
    thread.start()
    started.wait(60)
    yield made
    end.set()
    thread.join(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    opened = InProcess(tmp_path_factory.mktemp("hostile"), max_queue=1)
    yield opened
    opened.close()


@pytest.fixture
def full(server: InProcess, hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    """A full server with the hostile one behind it; small limits of bytes, none of time."""
    for name, value in {
        "BEGIN_S": 3600.0,
        "WHOLE_S": 3600.0,
        "STREAM_S": 3600.0,
        "MAX_WHOLE_BYTES": 2**20,
        "MAX_STREAM_BYTES": 2**20,
        "MAX_MODELS_BYTES": 2**16,
    }.items():
        monkeypatch.setattr(upstream, name, value)
    hostile.heads.clear()
    hostile.num_sent, hostile.models = 0, MODELS
    server.state.upstream = FallbackUpstream(hostile.url, key="sesame")
    house = Full(server)
    house.fill()
    yield house
    house.tickets[0].close()
    asyncio.run_coroutine_threadsafe(server.state.upstream.close(), server.loop).result(60)


def refused(full: Full, **fields: Any) -> None:
    """The client gets the refusal that it would have had, and others are served."""
    answer = full.post(**fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert requests.get(full.server.url + "/health", timeout=30).status_code == 200


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_fallback_is_no_answer(
    full: Full, hostile: Hostile, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit is as long as it takes to ask; its model is known by then."""
    hostile.answers, stream = REFUSED[name]
    if name in SLOW:
        hostile.answers = says(b"")
        refused(full)
        hostile.heads.pop()
        hostile.answers = REFUSED[name][0]
    for seconds in (0.3, 3.0, 30.0) if name in SLOW else (3600.0,):
        monkeypatch.setattr(upstream, "BEGIN_S", seconds)
        monkeypatch.setattr(upstream, "WHOLE_S", seconds)
        refused(full, stream=stream)
        if len(hostile.heads) > 1:
            break
    assert [head[:4] for head in hostile.heads] == [b"GET ", b"POST"], "nowhere else"
    assert b"sesame" in hostile.heads[1] and b"Cookie" not in hostile.heads[1]
    assert hostile.num_sent < 40_000_000


@pytest.mark.parametrize(
    "models",
    [
        b"",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "a\\r\\nset-cookie: b=c"}]}',
        b'{"data": [{"id": "\xe2\x80\xae"}]}',
        json.dumps({"data": [{"id": "x" * 300}]}).encode(),
        json.dumps({"data": [{"id": "x", "more": "y" * 100_000}]}).encode(),
    ],
)
def test_models_that_are_none(full: Full, hostile: Hostile, models: bytes) -> None:
    hostile.models, hostile.answers = models, says(json_answer(b"{}"))
    refused(full)
    assert not any(head.startswith(b"POST") for head in hostile.heads)


SLOW_STREAM = repeats(SSE + EVENTS[0], b":", 0.02)


@pytest.mark.parametrize(
    "answers",
    [
        repeats(SSE, EVENTS[0] * 1000),
        repeats(SSE, b"data: " + b"x" * 100_000),
        SLOW_STREAM,
    ],
    ids=["endless", "one endless line", "slow"],
)
def test_a_hostile_stream_ends_with_an_error(
    full: Full, hostile: Hostile, answers: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answers is SLOW_STREAM:
        monkeypatch.setattr(upstream, "STREAM_S", 0.5)
    hostile.answers = answers
    answer = full.post(stream=True)
    assert answer.status_code == 200 and len(answer.content) < 2**21
    assert answer.content.endswith(b"\n\n") and b"[DONE]" not in answer.content
    last = answer.content.strip().rpartition(b"\n\n")[2].removeprefix(b"data: ")
    assert json.loads(last)["error"]["code"] == "fallback_failed"


def test_its_headers_are_not_ours(full: Full, hostile: Hostile) -> None:
    hostile.answers = says(
        json_answer(b'{"ok": true}', b"set-cookie: a=b", b"x-request-id: forged", b"server: evil")
    )
    answer = full.post()
    assert answer.json() == {"ok": True} and answer.headers["content-type"] == "application/json"
    assert "set-cookie" not in answer.headers and answer.headers["x-request-id"] != "forged"
    assert answer.headers["x-headway-fallback"] == "big; reason=queue"
