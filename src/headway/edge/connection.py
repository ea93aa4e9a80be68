"""HTTP connection with limits: size, speed, and number per address.

It is uvicorn's h11 protocol with deadlines. A new connection must send complete headers within
`HEADERS_S`, then a body at `MIN_BODY_BYTES_PER_S` after a grace period, and must read what it is
sent. `ConnectionLimiter` counts connections, in all and by address, and closes late ones once a
second. Bytes are parsed in slices, round-robin over senders (`ParseTurns`), so that neither a body
in a million chunks nor a thousand concurrent requests of one key delay other connections.
"""

import asyncio
import re
import socket
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from headway.core.errors import EngineDownError, RequestError
from headway.edge.errors import error_body
from headway.edge.framing import AMBIGUOUS, StrictConnection

try:
    from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]
except ImportError:  # where there is no uvloop
    from asyncio.sslproto import SSLProtocol

HEADERS_S, BODY_GRACE_S, WRITE_S, HANDSHAKE_S = 10.0, 20.0, 60.0, 10.0
MIN_BODY_BYTES_PER_S = 10_000
SWEEP_S = 1.0
SLICE_BYTES, PLAIN_SLICE_BYTES, TURN_S = 4096, 65536, 0.005
"""A slice may hold a thousand chunks; the rest of a body without chunks is one piece."""
KEY = re.compile(rb"\n(?:authorization|x-api-key)[ \t]*:[ \t]*([^\r\n]{1,200})", re.IGNORECASE)
LINGER_BYTES = 16 * 2**20
IDLE, HEADERS, BODY = "idle", "headers", "body"


class Flow(FlowControl):
    """Flow control that pauses reading while the application or the parser is behind (`hold`).

    `unread_s` is the total time in which reading was paused, up to the last resumption.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.held = False
        self.unread_s = self._since_s = 0.0

    def hold(self) -> None:
        self._set(self.read_paused, True)

    def release(self) -> None:
        self._set(self.read_paused, False)

    def pause_reading(self) -> None:
        self._set(True, self.held)

    def resume_reading(self) -> None:
        self._set(False, self.held)

    def _set(self, read_paused: bool, held: bool) -> None:
        stood, stands = self.read_paused or self.held, read_paused or held
        self.read_paused, self.held = read_paused, held
        if stands and not stood:
            self._since_s = time.monotonic()
            self._transport.pause_reading()
        elif stood and not stands:
            self.unread_s += time.monotonic() - self._since_s
            self._transport.resume_reading()


class ParseTurns:
    """Round-robin over senders: bytes are parsed for `TURN_S` in each turn of the event loop.

    A sender is a key, or the address of a client without one. Bytes are parsed at once while there
    is time, else in a later turn, and not at all if the client disconnected by then:

        key a: 500 concurrent requests, key b: one    a b a a … in the first 5 ms, then other work,
                                                      the rest of a's 5 ms at a time
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Connection]] = {}
        self._until_s = 0.0
        self._is_scheduled = False

    def add(self, connection: "Connection") -> None:
        """Parse the bytes of `connection`, now or in its sender's turn."""
        if connection.is_queued:
            return
        if not self._is_scheduled:
            self._schedule()
        elif self._waiting or time.monotonic() > self._until_s:
            self._queue(connection)
            return
        if connection.parse_slice():
            self._queue(connection)

    def _schedule(self) -> None:
        """Start the next turn after this round of the event loop."""
        self._is_scheduled, self._until_s = True, time.monotonic() + TURN_S
        asyncio.get_running_loop().call_soon(self._turn)

    def _queue(self, connection: "Connection") -> None:
        connection.is_queued = True
        connection.flow.hold()
        self._waiting.setdefault(connection.sender(), deque()).append(connection)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._waiting:
            self._schedule()
        while self._waiting:
            sender = next(iter(self._waiting))
            connections = self._waiting.pop(sender)
            connection = connections.popleft()
            if connections:
                self._waiting[sender] = connections  # behind the others
            connection.is_queued = False
            if connection.was_reset():
                connection.transport.abort()
            elif connection.parse_slice():
                self._queue(connection)
            if time.monotonic() > self._until_s:
                return


class Handshake(SSLProtocol):  # type: ignore[misc]
    """TLS layer of one connection, which is counted from its first byte on.

    An asyncio server with a TLS context reports a connection to its protocol after the handshake,
    and waits a minute for it: a client that connects and sends nothing would be subject to no
    limit, and could use up all file descriptors. `enter` returns whether there is room for a
    connection of its address; `leave` is called with the address when it is lost.
    """

    def __init__(
        self,
        loop: Any,
        connection: Any,
        context: ssl.SSLContext,
        enter: Callable[[str], bool],
        leave: Callable[[str], None],
    ) -> None:
        super().__init__(
            loop, connection, context, None, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
        )
        self._enter, self._leave, self._address = enter, leave, ""

    def connection_made(self, transport: Any) -> None:
        """Start the handshake, or close at once if there are too many connections."""
        client = get_remote_addr(transport)
        self._address = client[0] if client else ""
        if self._enter(self._address):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave(self._address)


class ConnectionLimiter:
    """Open connections of one server."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.by_address: Counter[str] = Counter()
        self.connections: set[Connection] = set()
        self.context: ssl.SSLContext | None = None
        """TLS context, or None for plain HTTP."""
        self.turns = ParseTurns()

    def enter(self, connection: "Connection", address: str) -> bool:
        """Count a connection; returns False if there are too many, in all or of its address."""
        if connection in self.connections:  # counted when its handshake began
            return True
        full = len(self.connections) >= self.max_connections
        if full or self.by_address[address] >= self.max_connections // 2:
            return False
        self.connections.add(connection)
        self.by_address[address] += 1
        return True

    def leave(self, connection: "Connection", address: str) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.by_address[address] -= 1
            if not self.by_address[address]:
                del self.by_address[address]

    async def watch(self) -> None:
        """Close late connections, once a second."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for connection in list(self.connections):
                connection.judge(now_s)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "Connection | Handshake":
        """Return the protocol object of a new connection, for uvicorn."""
        made = Connection(self, config, server_state, app_state, _loop)
        if self.context is None:
            return made
        enter, leave = partial(self.enter, made), partial(self.leave, made)
        return Handshake(asyncio.get_running_loop(), made, self.context, enter, leave)


class Connection(H11Protocol):
    """HTTP connection with deadlines; `phase` is what the client must send next."""

    def __init__(self, limiter: ConnectionLimiter, *given: Any) -> None:
        super().__init__(*given)
        self.conn = StrictConnection(self.conn._max_incomplete_event_size)
        self.limiter = limiter
        self.address = ""
        self.phase, self.since_s = HEADERS, time.monotonic()
        self.num_body_bytes, self._unread_s = 0, 0.0
        self.stalled_s: float | None = None
        self._backlog = bytearray()
        self.is_queued = False
        """Whether the connection waits for its sender's turn."""
        self._sender = ""
        self._refused = False
        self._lingers_until = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self.address = self.client[0] if self.client else ""
        if not self.limiter.enter(self, self.address):
            self._refused = True
            self.refuse(
                EngineDownError("Too many connections.", code="too_many_connections"),
                "Service Unavailable",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.leave(self, self.address)
        self._backlog.clear()
        super().connection_lost(exc)

    # ── received bytes ──────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._is_amid_body(len(data)):
            self._take_plain(data)
            return
        self._backlog += data
        if len(self._backlog) == len(data):  # else it is queued, or waits for a response to end
            self.limiter.turns.add(self)

    def _is_amid_body(self, num_bytes: int) -> bool:
        """Return whether these bytes are inside a body with Content-Length, not its last ones."""
        if self._backlog or self.conn.their_state is not h11.SEND_BODY:
            return False
        return self.conn.our_state is not h11.DONE and num_bytes < self._remaining_body()

    def _remaining_body(self) -> int:
        """Return the missing bytes of a body with Content-Length; 0 without one."""
        remaining: int = getattr(self.conn._reader, "_remaining", 0)
        return remaining

    def _take_plain(self, data: bytes) -> None:
        """Take bytes of a body without h11, which would copy each byte six times."""
        reader, cycle = self.conn._reader, self.cycle
        reader._remaining -= len(data)  # type: ignore[union-attr]
        cycle.body = cycle.body + data if cycle.body else data  # type: ignore[assignment]
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()
        self._note(len(data))

    def sender(self) -> str:
        """Return the key in the headers received so far, else the address."""
        match = KEY.search(bytes(self._backlog[:SLICE_BYTES]))
        if match is not None:
            self._sender = match[1].decode("latin-1")
        return self._sender or self.address

    def was_reset(self) -> bool:
        """Return whether the client reset the connection; asyncio reports it only to a reader."""
        end = self.transport.get_extra_info("socket")
        return end is not None and end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def parse_slice(self) -> bool:
        """Parse one slice; returns whether more can be parsed now."""
        if self._can_parse():
            size = max(SLICE_BYTES, min(PLAIN_SLICE_BYTES, self._remaining_body()))
            piece = bytes(self._backlog[:size])
            del self._backlog[:size]
            super().data_received(piece)
            self._note(len(piece))
        if self._can_parse():
            return True
        if self._backlog:
            self.flow.hold()
        elif not self.transport.is_closing():
            self.flow.release()
        return False

    def _can_parse(self) -> bool:
        """Return whether bytes can be parsed; those of a next request wait for the response."""
        waits = self.conn.their_state is h11.DONE
        return bool(self._backlog) and not waits and not self.transport.is_closing()

    def _note(self, num_bytes: int) -> None:
        """Update the phase, its start, and the received bytes of a body."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if self.phase != BODY:
                self.phase, self.since_s, self.num_body_bytes = BODY, time.monotonic(), 0
                self._unread_s = self.flow.unread_s
            self.num_body_bytes += num_bytes
            if self.conn.our_state is h11.DONE and self.num_body_bytes > self._lingers_until:
                self.transport.close()
        elif state is h11.IDLE and self.conn.trailing_data[0]:
            if self.phase != HEADERS:
                self.phase, self.since_s = HEADERS, time.monotonic()
        elif state is not h11.IDLE or self.phase != HEADERS:
            self.phase = IDLE

    # ── deadlines ───────────────────────────────────────────────────────────────────────────

    def judge(self, now_s: float) -> None:
        """Close the connection if it is late; a TLS handshake has a limit of its own."""
        if self.transport is None or self.transport.is_closing():
            return
        waited_s = now_s - self.since_s
        if self.stalled_s is not None and now_s - self.stalled_s > WRITE_S:
            self.transport.abort()
        elif self.phase == HEADERS and waited_s > HEADERS_S and not self.is_queued:
            self.refuse(
                timeout_error(f"The headers took more than {HEADERS_S:.0f} s."), "Request Timeout"
            )
        elif self.phase == BODY and self._body_is_late(waited_s):
            self.refuse(timeout_error("The body comes too slowly."), "Request Timeout")

    def _body_is_late(self, waited_s: float) -> bool:
        """Return whether too little of the body arrived; time with paused reading is excluded."""
        if self.flow.read_paused or self.flow.held:
            return False
        waited_s -= self.flow.unread_s - self._unread_s
        return waited_s > BODY_GRACE_S + self.num_body_bytes / MIN_BODY_BYTES_PER_S

    def pause_writing(self) -> None:
        self.stalled_s = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.stalled_s = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Drop the unread rest of a body, up to `LINGER_BYTES`."""
        self._lingers_until = self.num_body_bytes + LINGER_BYTES
        super().on_response_complete()
        if self._backlog:
            self.loop.call_soon(self.limiter.turns.add, self)

    # ── answers outside a request ───────────────────────────────────────────────────────────

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refused: malformed, or headers beyond the limit."""
        fault = sys.exception()
        status = getattr(fault, "error_status_hint", 400)
        too_long = status == 431
        why = f" {fault}" if str(fault) in AMBIGUOUS else ""
        self.refuse(
            RequestError(
                "The headers are larger than 64 kB."
                if too_long
                else f"This is no valid HTTP.{why}",
                code="headers_too_large" if too_long else "invalid_http",
                status=status,
            ),
            "Request Header Fields Too Large" if too_long else "Bad Request",
        )

    def refuse(self, error: RequestError, reason: str) -> None:
        """Answer with `error` and close; in the middle of a response, only close."""
        self.phase = IDLE
        self._backlog.clear()
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        body = msgspec.json.encode(error_body(error))
        retry = "retry-after: 1\r\n" if error.retry_after_s is not None else ""
        head = (
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def timeout_error(message: str) -> RequestError:
    return RequestError(message, code="request_timeout", status=408)
