"""Response to a client: a stream of events with keep-alives, or one body."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Send

TICK_S = 0.5
GRACE_S = 1.0
"""Seconds of silence after which headers are sent, once the engine has begun the request."""
ENGINE_WAIT_S = 2.0
"""Seconds of silence after which headers are sent, while the request waits for the engine."""
PING_INTERVAL_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """SSE response that is opened early and interrupts long silences with pings.

    Headers go with the first event. Without an event, `opening` returns the first bytes as soon as
    `due` is true of the seconds of silence; from then on a ping follows every 15 s of silence.
    """

    __slots__ = (
        *("_due", "_headers", "_keeper", "_lock", "_opening", "_ping", "_send", "_silent_s"),
        "started",
    )

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        ping: bytes = PING,
        *,
        opening: Callable[[], bytes] = lambda: b"",
        due: Callable[[float], bool] = lambda silent_s: silent_s >= ENGINE_WAIT_S,
    ) -> None:
        self._send = send
        self._headers = headers
        self._ping = ping
        self._opening = opening
        self._due = due
        self._lock = asyncio.Lock()
        self.started = False
        self._silent_s = 0.0
        self._keeper = asyncio.get_running_loop().create_task(self._keep_alive())

    def write(self, data: bytes, *, last: bool = False) -> Awaitable[None]:
        """Send one or several events after those in flight; the caller must await it at once.

        Inside a stream the lock is not taken: the order of a ping and an event does not matter.
        """
        if self.started and not last and not self._lock.locked():
            self._silent_s = 0.0
            return self._send({"type": "http.response.body", "body": data, "more_body": True})
        return self._in_turn(data, last)

    async def _in_turn(self, data: bytes, last: bool = False) -> None:
        """Send under the lock, which orders the first event, the last event and pings."""
        async with self._lock:
            if not self.started:
                await self._start()
            self._silent_s = 0.0
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self) -> None:
        """Send the headers, once."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True

    async def _keep_alive(self) -> None:
        """Open the stream when it is due, then send a ping in each long silence."""
        while True:
            await asyncio.sleep(TICK_S)
            self._silent_s += TICK_S
            if self.started:
                if self._silent_s >= PING_INTERVAL_S:
                    await self._in_turn(self._ping)
            elif self._due(self._silent_s):
                await self._in_turn(self._opening() or self._ping)

    def stop_pinging(self) -> None:
        self._keeper.cancel()

    async def end(self, data: bytes) -> None:
        """Send the last event; the response is complete."""
        await self.write(data, last=True)


async def send_response(response: Response, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a complete response with additional `headers`."""
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": [*response.raw_headers, *headers],
        }
    )
    await send({"type": "http.response.body", "body": response.body})
