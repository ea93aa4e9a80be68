"""Requests of one key that come all at once are parsed turn by turn, another key's in between."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from headway.config.options import ServerOptions
from headway.edge import connection
from headway.edge.connection import ConnectionLimiter
from headway.edge.serving import http_server

REQUEST = b"GET /%b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n"


class Served:
    """A server that notes the paths it is asked for, in their order, and the loop's turns."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.turns: list[int] = []
        self.num_turns = 0
        self.address = ("", 0)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"][1:])
        self.turns.append(self.num_turns)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def count(self) -> None:
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.setblocking(False)
        found.address = listener.getsockname()
        server = http_server(found.app, ConnectionLimiter(1024), ServerOptions())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield found
        server.should_exit = True
        await serving


async def opened(served: Served, count: int) -> list[socket.socket]:
    """Connections that have said nothing yet."""
    found = [socket.create_connection(served.address) for _ in range(count)]
    await asyncio.sleep(0.2)  # accepted
    return found


async def test_another_key_is_parsed_among_the_first(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With time for one slice in each turn: of 100 requests that are here the other's is second."""
    monkeypatch.setattr(connection, "TURN_S", -1.0)
    sockets = await opened(served, 101)
    counting = asyncio.create_task(served.count())
    for each in sockets[:-1]:
        each.send(REQUEST % (b"storm", b"one"))
    sockets[-1].send(REQUEST % (b"other", b"two"))
    while len(served.paths) < 101:
        await asyncio.sleep(0.001)
    counting.cancel()
    assert served.paths.index("other") <= 10
    assert len(set(served.turns)) > 50, "others have a turn in between"
    for each in sockets:
        each.close()


async def test_who_has_left_is_not_parsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", -1.0)
    sockets = await opened(served, 100)
    for each in sockets:
        each.send(REQUEST % (b"storm", b"one"))
    reset = (1).to_bytes(4, "little") + bytes(4)
    for each in sockets[50:]:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        each.close()
    (last,) = await opened(served, 1)
    last.send(REQUEST % (b"last", b"one"))
    while "last" not in served.paths:
        await asyncio.sleep(0.001)
    assert served.paths.count("storm") == 50
    for each in [*sockets[:50], last]:
        each.close()


async def test_a_request_that_is_queued_comes_in_whole(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in one connection, many slices long, beside a storm."""
    monkeypatch.setattr(connection, "TURN_S", -1.0)
    sockets = await opened(served, 20)
    head = b"x-pad: " + b"a" * 9000 + b"\r\n"
    long = REQUEST.replace(b"host: x\r\n", b"host: x\r\n" + head) % (b"long", b"two")
    for each in sockets:
        each.send(REQUEST % (b"storm", b"one") * 3)
    sockets[0].setblocking(True)
    await asyncio.to_thread(sockets[0].sendall, long * 2)
    while len(served.paths) < 62:
        await asyncio.sleep(0.001)
    assert served.paths.count("long") == 2
    for each in sockets:
        each.close()
