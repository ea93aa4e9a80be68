"""The HTTP client for upstreams: nothing that one of them sends holds up the event loop.

aiohttp parses whatever the socket has in one go, and waits for ever behind informational responses.
Here bytes are parsed in slices, those of all connections together for some milliseconds in each
turn of the loop, and an answer has a bounded number of informational responses before it.
"""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import BadHttpMessage

SLICE_BYTES, TURN_S = 4096, 0.002
"""A slice may hold hundreds of chunks or of responses."""
MAX_INFORMATIONAL = 16
READ_BYTES = 2**18


class ResponseProtocol(ResponseHandler):
    """One connection; `behind` are those of its session with bytes that are not parsed yet."""

    def __init__(self, behind: "set[ResponseProtocol]", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._behind = behind
        self._backlog = bytearray()
        self._is_scheduled = False
        self._num_informational = 0

    def data_received(self, data: bytes) -> None:
        """Parse up to a slice at once; empty data means that aiohttp goes on with what it has."""
        if not (self._backlog or len(data) > SLICE_BYTES):
            super().data_received(data)
            return
        if not data:
            super().data_received(data)
            self._schedule()
            return
        self._backlog += data
        self._pause_reading_for_buffer()
        if not self._is_scheduled:
            self._parse_slices()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._parse_slices)

    def _parse_slices(self) -> None:
        """Parse for some milliseconds; the rest waits until others had their turn."""
        self._is_scheduled = False
        behind = self._behind
        until_s = time.monotonic() + TURN_S / max(1, len(behind))
        while self._backlog and self.transport is not None and self._exception is None:
            if self._reading_paused:  # goes on when the reader has taken what is parsed
                behind.discard(self)
                return
            piece = bytes(self._backlog[:SLICE_BYTES])
            del self._backlog[:SLICE_BYTES]
            super().data_received(piece)
            if self._backlog and time.monotonic() > until_s:
                behind.add(self)
                self._schedule()
                return
        behind.discard(self)
        self._backlog.clear()
        self._resume_reading_for_buffer()

    @property
    def should_close(self) -> bool:
        """Whether it cannot be used again: bytes behind an answer would begin the next one."""
        return bool(self._backlog) or super().should_close

    def feed_data(self, data: tuple[Any, Any], size: int = 0) -> None:
        """Take a parsed response; no request expects an informational one, so it is dropped."""
        if not (100 <= data[0].code < 200 and data[0].code != 101):
            self._num_informational = 0
            super().feed_data(data, size)
            return
        self._num_informational += 1
        if self._num_informational > MAX_INFORMATIONAL and self._exception is None:
            self.set_exception(BadHttpMessage("too many informational responses"))
            if self.transport is not None:
                self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._behind.discard(self)
        rest, self._backlog = bytes(self._backlog), bytearray()
        if rest:  # TLS tells of the end together with the last bytes
            super().data_received(rest)
        super().connection_lost(exc)


class Connector(aiohttp.TCPConnector):
    """Makes connections of `ResponseProtocol`."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=30.0)
        behind: set[ResponseProtocol] = set()
        self._factory = partial(ResponseProtocol, behind, self._loop)  # type: ignore[assignment]


def make_session(
    headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
) -> aiohttp.ClientSession:
    """A session without cookies that decodes nothing, to be made in the server's loop."""
    return aiohttp.ClientSession(
        headers=headers,
        timeout=timeout,
        connector=Connector(),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BYTES,
    )


def api_root(url: str) -> str:
    """The address that paths follow: http://host:8000 → http://host:8000/v1, any path as it is."""
    root = url.rstrip("/")
    return root if urlsplit(root).path else f"{root}/v1"


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body; ValueError beyond `max_bytes`."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
    return bytes(data)


def dialect_headers(path: str) -> dict[str, str]:
    """Headers of a request's dialect: Anthropic's for its paths, whose errors have its shape."""
    return {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
