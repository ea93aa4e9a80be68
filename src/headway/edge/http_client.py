"""HTTP client for upstreams, whose responses cannot block the event loop.

aiohttp parses all bytes of the socket at once, and waits for ever after informational responses.
Here bytes are parsed in slices, for a few milliseconds per turn of the event loop over all
connections, and the number of informational responses is bounded.
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
    """One connection; `behind` is the set of the session's connections with unparsed bytes."""

    def __init__(self, behind: "set[ResponseProtocol]", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._behind = behind
        self._backlog = bytearray()
        self._is_scheduled = False
        self._num_informational = 0

    def data_received(self, data: bytes) -> None:
        """Parse up to a slice at once; empty data means that aiohttp resumes with its buffer."""
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
        """Parse for a few milliseconds; the rest waits for the next turn."""
        self._is_scheduled = False
        behind = self._behind
        until_s = time.monotonic() + TURN_S / max(1, len(behind))
        while self._backlog and self.transport is not None and self._exception is None:
            if self._reading_paused:  # resumes when the reader has consumed what is parsed
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
        """Return whether it cannot be reused: bytes after a response would begin the next one."""
        return bool(self._backlog) or super().should_close

    def feed_data(self, data: tuple[Any, Any], size: int = 0) -> None:
        """Take a parsed response; informational ones are dropped, no request expects them."""
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
        if rest:  # TLS reports the end together with the last bytes
            super().data_received(rest)
        super().connection_lost(exc)


class Connector(aiohttp.TCPConnector):
    """Connector whose connections are of `ResponseProtocol`."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=30.0)
        behind: set[ResponseProtocol] = set()
        self._factory = partial(ResponseProtocol, behind, self._loop)  # type: ignore[assignment]


def make_session(
    headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
) -> aiohttp.ClientSession:
    """Return a session without cookies and decompression; to be called in the event loop."""
    return aiohttp.ClientSession(
        headers=headers,
        timeout=timeout,
        connector=Connector(),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BYTES,
    )


def api_root(url: str) -> str:
    """Return the API's root: http://host:8000 → http://host:8000/v1; a URL with a path stays."""
    root = url.rstrip("/")
    return root if urlsplit(root).path else f"{root}/v1"


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body; ValueError beyond `max_bytes`."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
    return bytes(data)


def dialect_headers(path: str) -> dict[str, str]:
    """Return the headers of a dialect: an API version for Anthropic's paths."""
    return {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
