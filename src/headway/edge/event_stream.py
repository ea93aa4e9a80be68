"""An answer on its way to the client: events that are never silent for long, or one body."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Send

TICK_S = 0.5
GRACE_S = 1.0
"""A stream without headers gets them after so long a silence, once the engine has begun with it."""
WAIT_S = 2.0
"""The same while it waits for the engine."""
PING_INTERVAL_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """An SSE answer that is opened early and never silent for long.

    Headers go with the first event. Where none comes, `opening` is asked for one as soon as `due`
    says so of the seconds of silence; from then on a ping follows every 15 s of silence.
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
        due: Callable[[float], bool] = lambda silent_s: silent_s >= WAIT_S,
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
        """Send one or several events, behind whatever is on its way; to be awaited at once.

        Amid a stream the lock is not taken: a ping that comes meanwhile is no trouble.
        """
        if self.started and not last and not self._lock.locked():
            self._silent_s = 0.0
            return self._send({"type": "http.response.body", "body": data, "more_body": True})
        return self._in_turn(data, last)

    async def _in_turn(self, data: bytes, last: bool = False) -> None:
        """The same where order counts: the first, the last, and pings beside them."""
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
        """Open the stream where nothing has, then break each long silence."""
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
        """The last event; the response is complete."""
        await self.write(data, last=True)


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
