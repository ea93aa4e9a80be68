"""HTTP itself: what a client may send, how slowly, and beside how many; others do not notice."""

import asyncio
import contextlib
import hashlib
import random
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_gateway import LiveGateway
from live_server import LiveAddress, LiveServer

from conftest import StartServer
from headway.edge import connection
from headway.edge.connection import Connection, ConnectionLimiter

MB = 10**6
PATIENT_S = 60.0


@pytest.fixture(scope="module")
def gateway(server: LiveServer) -> Iterator[LiveGateway]:
    live = LiveGateway(server.url)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture(params=["serve", "gateway"])
def edge(request: pytest.FixtureRequest) -> LiveAddress:
    """What a client meets: a server, or a gateway before it."""
    found: LiveAddress = request.getfixturevalue(
        "server" if request.param == "serve" else "gateway"
    )
    return found


def address(live: LiveAddress) -> tuple[str, int]:
    host, _, port = live.url.removeprefix("http://").partition(":")
    return host, int(port)


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        * 1024
    )


async def send_raw(live: LiveAddress, pieces: list[bytes], pause_s: float = 0) -> bytes:
    """Send pieces for as long as the server takes them; returns all it answers."""
    reader, writer = await asyncio.open_connection(*address(live))
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if answer.done():
                break
            if pause_s:
                await asyncio.sleep(pause_s)
    try:
        return await asyncio.wait_for(answer, PATIENT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), msgspec.json.decode(body)["error"]


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
ATTACKS: dict[str, tuple[list[bytes], set[int]]] = {
    "one header of 60 MB": ([GET + b"x: ", *[b"a" * MB] * 60, b"\r\n\r\n"], {431}),
    "a million headers": ([GET, *[b"a: b\r\n" * 10_000] * 100, b"\r\n"], {431}),
    "headers just too large": ([GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n"], {431}),
    "a URL of 1 MB": ([b"GET /" + b"a" * MB + b" HTTP/1.1\r\nhost: x\r\n\r\n"], {431}),
    "no HTTP": ([b"\x16\x03\x01\x02\x00\x01\x00" * 100], {400}),
    "a length that is no number": ([POST + b"content-length: -5\r\n\r\n"], {400}),
    "a body of 60 MB": ([POST + b"content-length: 60000000\r\n\r\n", *[b" " * MB] * 60], {413}),
    "60 MB in chunks": ([CHUNKED, *[b"f4240\r\n" + b" " * MB + b"\r\n"] * 60], {413}),
    "many tiny chunks": ([CHUNKED, *[b"1\r\n \r\n" * 5000] * 30, b"0\r\n\r\n"], {400}),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_http_itself_is_bounded(edge: LiveAddress, name: str) -> None:
    """Each is refused in its own words, in little memory, while others are served."""
    pieces, statuses = ATTACKS[name]
    before = rss_bytes(edge.pid)
    attack = asyncio.create_task(send_raw(edge, pieces))
    while not attack.done():
        assert (await asyncio.to_thread(edge.get, "/health"))[0] == 200
        await asyncio.sleep(0.02)
    answer = await attack
    if answer:  # a client that sends on after the refusal may find the connection reset
        status, error = parsed(answer)
        assert status in statuses and error["code"], error
    assert rss_bytes(edge.pid) - before < 50 * MB
    assert edge.probe()


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
FIRST = POST + b"content-length: 2\r\n\r\n{}"
BEHIND = [FIRST + CHUNKED + b"1\r\n \r\n" * 34_000 + b"0\r\n\r\n"]
"""200 kB of tiny chunks right behind a request: parsed at once they take a second."""


async def test_what_follows_a_request_is_answered_too(edge: LiveAddress) -> None:
    assert (await send_raw(edge, BEHIND)).count(b"HTTP/1.1 400") == 2


AMBIGUOUS = {
    "two lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks first": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a bare line feed": b"x: y\ncontent-length: 2\r\n\r\n{}",
    "bare line feeds alone": b"content-length: 2\n\n{}",
    "a folded line": b"x: y\r\n content-length: 2\r\n\r\n",
    "a folded line with a tab": b"x: y\r\n\tz\r\ncontent-length: 2\r\n\r\n{}",
    "a bare carriage return": b"x: y\rz: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a folded trailer": b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_what_two_servers_could_read_differently_is_refused(
    edge: LiveAddress, name: str
) -> None:
    """And the connection is closed: what follows is not read as another request."""
    after = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = await send_raw(edge, [POST + AMBIGUOUS[name] + after])
    status, error = parsed(answer)
    assert (status, error["code"]) == (400, "invalid_http")
    assert answer.count(b"HTTP/1.1") == 1


async def test_chunks_are_for_http_1_1(edge: LiveAddress) -> None:
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await send_raw(edge, [old + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"])
    assert parsed(answer)[1]["message"].endswith("HTTP/1.0 has no transfer-encoding.")


@pytest.mark.hardening
@pytest.mark.parametrize("name", [*ATTACKS, "chunks behind a request"])
async def test_health_answers_within_100_ms_under_attack(edge: LiveAddress, name: str) -> None:
    pieces, _ = ATTACKS.get(name, (BEHIND, {400}))
    slowest = 0.0
    attack = asyncio.create_task(send_raw(edge, pieces))
    while not attack.done():
        began = time.monotonic()
        assert (await asyncio.to_thread(edge.get, "/health"))[0] == 200
        slowest = max(slowest, time.monotonic() - began)
    await attack
    assert slowest < 0.1, slowest


# ── deadlines, with a clock of the test's own ───────────────────────────────────────────────


@pytest.fixture
async def small_server(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[[bytes], Awaitable[tuple[Any, Any]]]]:
    """A bare server of these connections over an application that answers a body's SHA-256."""
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        digest, more = hashlib.sha256(), True
        while more:
            message = await receive()
            digest.update(message.get("body", b""))
            more = message.get("more_body", False)
            await asyncio.sleep(0.003)  # so that pieces come that are not read yet
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": digest.hexdigest().encode()})

    taken: Counter[Connection] = Counter()
    note = Connection._note

    def noted(self: Connection, num_bytes: int) -> None:
        taken[self] += num_bytes
        note(self, num_bytes)

    monkeypatch.setattr(Connection, "_note", noted)
    limiter = ConnectionLimiter(4)
    config = uvicorn.Config(app, http=limiter.protocol, lifespan="off", log_config=None, ws="none",
                            access_log=False, timeout_keep_alive=60)  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        server.limiter, server.address = limiter, listener.getsockname()
        server.taken = taken
        yield server
        server.should_exit = True
        await serving


async def connect(server: Any, data: bytes) -> tuple[Any, Any, Connection]:
    """A client that has sent `data`, and the server's end of its connection, which has it."""
    known = set(server.limiter.connections)
    reader, writer = await asyncio.open_connection(*server.address)
    while not server.limiter.connections - known:
        await asyncio.sleep(0.005)
    (mine,) = server.limiter.connections - known
    writer.write(data)
    while server.taken[mine] < len(data):
        await asyncio.sleep(0.005)
    return reader, writer, mine


@pytest.mark.parametrize(
    ("data", "allowed_s"),
    [
        (b"", connection.HEADERS_S),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: ", connection.HEADERS_S),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nabc",
            connection.BODY_GRACE_S,
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + b"a" * 50_000,
            connection.BODY_GRACE_S + 5,
        ),
    ],
    ids=["silence", "headers", "body", "slow body"],
)
async def test_who_is_slow_is_told_and_closed(
    small_server: Any, data: bytes, allowed_s: float
) -> None:
    reader, writer, mine = await connect(small_server, data)
    mine.judge(mine.since_s + allowed_s - 2)
    assert not mine.transport.is_closing()
    mine.judge(mine.since_s + allowed_s + 2)
    status, error = parsed(await reader.read())
    assert (status, error["code"]) == (408, "request_timeout")
    writer.close()


async def test_while_we_do_not_read_nobody_is_slow(small_server: Any) -> None:
    """A body that began 1,000 s ago, of which we did not read for all that time."""
    data = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nabc"
    reader, writer, mine = await connect(small_server, data)
    mine.since_s -= 1000
    mine.flow.hold()
    mine.flow._since_s -= 1000
    mine.flow.release()
    due_s = mine.since_s + mine.flow.unread_s + connection.BODY_GRACE_S
    mine.judge(due_s - 2)
    assert not mine.transport.is_closing()
    mine.judge(due_s + 2)
    assert parsed(await reader.read())[0] == 408
    writer.close()


async def test_who_keeps_a_connection_is_not_slow(small_server: Any) -> None:
    reader, writer, mine = await connect(small_server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(3):
        assert b"200" in await reader.readline()
        while (await reader.readline()).strip() != b"0":
            pass
        await reader.readline()
        mine.judge(time.monotonic() + 1000)
        assert not mine.transport.is_closing()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    writer.close()


@pytest.mark.parametrize("seed", range(8))
async def test_a_body_is_the_same_however_it_is_cut(small_server: Any, seed: int) -> None:
    """Three requests in one connection, cut anywhere, each body with its length or in chunks."""
    source = random.Random(seed)
    bodies = [source.randbytes(source.choice([1, 5000, 300_000, 1_500_000])) for _ in range(3)]
    sent = b""
    for data in bodies:
        head = b"POST / HTTP/1.1\r\nhost: x\r\n"
        if source.random() < 0.7:
            sent += head + b"content-length: %d\r\n\r\n" % len(data) + data
        else:
            sent += head + b"transfer-encoding: chunked\r\n\r\n"
            sent += b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n"
    reader, writer = await asyncio.open_connection(*small_server.address)
    cuts = sorted(source.randrange(len(sent)) for _ in range(20))
    for begin, end in pairwise([0, *cuts, len(sent)]):
        writer.write(sent[begin:end])
        await writer.drain()
        await asyncio.sleep(0.001)
    found = b""
    while found.count(b"\r\n0\r\n\r\n") < 3:
        piece = await reader.read(65536)
        assert piece
        found += piece
    digests = [hashlib.sha256(data).hexdigest().encode() for data in bodies]
    assert re.findall(rb"[0-9a-f]{64}", found) == digests
    writer.close()


async def test_what_follows_a_request_is_read_a_slice_at_a_time_too(
    small_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time for a second slice the event loop goes round between any two of them."""
    monkeypatch.setattr(connection, "TURN_S", -1.0)
    sizes: list[int] = []
    at: list[int] = []
    rounds, parse = 0, connection.H11Protocol.data_received

    def parsed(self: Any, data: bytes) -> None:
        sizes.append(len(data))
        at.append(rounds)
        parse(self, data)

    monkeypatch.setattr(connection.H11Protocol, "data_received", parsed)
    reader, writer = await asyncio.open_connection(*small_server.address)
    writer.write(BEHIND[0])
    while sum(sizes) < len(BEHIND[0]):
        await asyncio.sleep(0)
        rounds += 1
    assert max(sizes) <= connection.SLICE_BYTES
    assert len(set(at)) == len(at) > 40
    assert (await reader.read()).count(b"HTTP/1.1 200") == 2
    writer.close()


async def test_who_does_not_read_is_cut_off(small_server: Any) -> None:
    _, writer, mine = await connect(small_server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    mine.pause_writing()
    mine.judge(mine.stalled_s + connection.WRITE_S - 1)
    assert not mine.transport.is_closing()
    mine.judge(mine.stalled_s + connection.WRITE_S + 1)
    assert mine.transport.is_closing()
    writer.close()


async def test_one_address_has_half_of_the_connections_at_most(small_server: Any) -> None:
    first, second = [await connect(small_server, b"") for _ in range(2)]
    reader, writer = await asyncio.open_connection(*small_server.address)
    status, error = parsed(await reader.read())
    assert (status, error["code"]) == (503, "too_many_connections")
    writer.close()
    first[1].close()
    while len(small_server.limiter.connections) > 1:
        await asyncio.sleep(0.01)
    third = await connect(small_server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200" in await third[0].readline()
    for _, writer, _ in (second, third):
        writer.close()


async def test_the_limit_on_connections_is_the_one_given(start_server: StartServer) -> None:
    live = start_server("--executor=null", "--max-connections=8").wait_ready()
    held = [await asyncio.open_connection(*address(live)) for _ in range(4)]
    answer = await send_raw(live, [])
    assert parsed(answer)[0] == 503, answer
    for _, writer in held:
        writer.close()
    while b" 200 " not in await send_raw(live, [HEALTH]):
        await asyncio.sleep(0.01)
