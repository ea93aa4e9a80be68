"""An answer on its way to the client: events that are never silent for long, or one body."""

import asyncio

from starlette.responses import Response
from starlette.types import Send

PING_INTERVAL_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """An SSE answer: headers with the first event, pings while nothing else is sent."""

    __slots__ = ("_headers", "_keep_alive", "_pinger", "_send", "last_s", "started")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], ping: bytes = PING) -> None:
        self._send = send
        self._headers = headers
        self._keep_alive = ping
        self.started = False
        self.last_s = 0.0
        self._pinger = asyncio.get_running_loop().create_task(self._ping())

    async def write(self, data: bytes) -> None:
        """Send one or several events."""
        if not self.started:
            await self._start()
        self.last_s = 0.0
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _start(self) -> None:
        self.started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _ping(self) -> None:
        """A ping after every 15 s of silence; it also sends the headers of a long wait."""
        while True:
            await asyncio.sleep(1.0)
            self.last_s += 1.0
            if self.last_s >= PING_INTERVAL_S:
                await self.write(self._keep_alive)

    def stop_pinging(self) -> None:
        self._pinger.cancel()

    async def end(self, data: bytes) -> None:
        """The last event; the response is complete."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


async def send_response(response: Response, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    """A complete answer, with `headers` beside its own."""
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": [*response.raw_headers, *headers],
        }
    )
    await send({"type": "http.response.body", "body": response.body})
