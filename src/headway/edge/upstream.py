"""Fallback server, reached by URL, for requests that this one would refuse or answer late.

Any server with OpenAI's dialect will do. A request is sent with the model's name there and without
the fields that only Headway knows; the response is relayed, streamed or whole. A response other
than 200, or in another form than requested, counts as no answer.

A fallback is trusted with its key and with the requests, and with nothing else: no redirects, no
cookies, no control over our headers; its headers, a whole answer and a stream are bounded in bytes
and in seconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from starlette.types import Receive, Send

from headway.core.errors import RequestError, UsageError
from headway.edge.errors import anthropic_body, error_event, speaks_anthropic
from headway.edge.http_client import api_root, dialect_headers, make_session, read_bounded
from headway.edge.lanes import wait_disconnect

log = logging.getLogger(__name__)

HEADWAY_FIELDS = ("slo", "service_class", "timings")
"""Fields that only Headway knows."""
CONNECT_S, SILENCE_S = 3.0, 120.0
TIMEOUT = aiohttp.ClientTimeout(
    total=None, connect=CONNECT_S, sock_connect=CONNECT_S, sock_read=SILENCE_S
)
BEGIN_S, WHOLE_S, STREAM_S = 60.0, 600.0, 3600.0
"""Seconds for a stream to begin, for a whole answer, and for a stream to end."""
MAX_WHOLE_BYTES, MAX_STREAM_BYTES, MAX_MODELS_BYTES = 32 * 2**20, 256 * 2**20, 2**20
MAX_NAME = 200
FAILURES = (
    *(aiohttp.ClientError, TimeoutError, OSError),
    *(msgspec.MsgspecError, ValueError, RecursionError),
)
STREAM, WHOLE = "text/event-stream", "application/json"


class ModelCard(msgspec.Struct):
    """Model in the answer of `/models`."""

    id: str


class Models(msgspec.Struct):
    """Answer of `/models`."""

    data: list[ModelCard]


class FallbackUpstream:
    """Server that answers instead of this one; `name` is the model there, "" to look it up."""

    def __init__(self, url: str, name: str = "", key: str = "") -> None:
        self.url = api_root(url)
        self.name = name
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        """Return the session, which is created in the event loop."""
        if self._session is None:
            self._session = make_session(self._headers(), TIMEOUT)
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {
            "content-type": WHOLE,
            "accept-encoding": "identity",
        }
        if self._key:
            headers |= {"authorization": f"Bearer {self._key}", "x-api-key": self._key}
        return headers

    async def close(self) -> None:
        """Close its connections; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _model(self, requested: str) -> str:
        """Return the model's name there: as given, as requested, or the first it serves."""
        if self.name:
            return self.name
        async with (
            asyncio.timeout(BEGIN_S),
            self._http().get(f"{self.url}/models", allow_redirects=False) as answer,
        ):
            check_answer(answer, WHOLE)
            data = await read_bounded(answer, MAX_MODELS_BYTES)
        served = [card.id for card in msgspec.json.decode(data, type=Models).data]
        if not served:
            raise ValueError("it serves no model")
        name = requested if requested in served else served[0]
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME):
            raise ValueError(f"its model has a name that is none: {name[:80]!r}")
        self.name = name
        return name

    async def answer(
        self,
        raw: dict[str, Any],
        reason: str,
        path: str,
        receive: Receive,
        send: Send,
        on_start: Callable[[], None],
    ) -> bool:
        """Ask for `raw` at `path` and relay the answer; returns False if nothing was sent."""
        streams = bool(raw.get("stream"))
        try:
            name = await self._model(raw["model"])
            body = {key: value for key, value in raw.items() if key not in HEADWAY_FIELDS}
            data = msgspec.json.encode({**body, "model": name})
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(BEGIN_S if streams else WHOLE_S):
                    answer = await stack.enter_async_context(
                        self._http().post(
                            self.url + path.removeprefix("/v1"),
                            data=data,
                            headers=dialect_headers(path),
                            allow_redirects=False,
                        )
                    )
                    check_answer(answer, STREAM if streams else WHOLE)
                    whole = b"" if streams else await read_bounded(answer, MAX_WHOLE_BYTES)
                if not streams:
                    msgspec.json.decode(whole, type=dict[str, msgspec.Raw])
                on_start()
                headers = [
                    (b"content-type", answer.content_type.encode()),
                    (b"cache-control", b"no-cache"),
                    (b"x-headway-fallback", f"{name}; reason={reason}".encode()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if streams:
                    await relay(answer, path, receive, send)
                else:
                    await send({"type": "http.response.body", "body": whole})
                return True
        except FAILURES as error:
            log.warning("the fallback %s does not answer: %s", self.url, error or type(error))
            return False


def check_answer(answer: aiohttp.ClientResponse, content_type: str) -> None:
    """Raise ValueError for another status, content type or encoding than expected."""
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    if answer.content_type != content_type:
        raise ValueError(f"{answer.content_type[:80]!r} in place of {content_type}")
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"encoded as {encoding[:80]!r}, which was not asked for")


async def relay(answer: aiohttp.ClientResponse, path: str, receive: Receive, send: Send) -> None:
    """Relay the stream until it ends or the client disconnects; it never ends silently."""
    leaving = asyncio.ensure_future(wait_disconnect(receive))
    loop, remaining_bytes, last = asyncio.get_running_loop(), MAX_STREAM_BYTES, b""
    line_end = b""
    until_s = loop.time() + STREAM_S
    reading: asyncio.Future[bytes] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(answer.content.readany())
            await asyncio.wait(
                {reading, leaving},
                timeout=max(0.0, until_s - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not reading.done():
                if leaving.done():
                    return
                last = line_end + failure_event(path)
                break
            try:
                chunk = reading.result()
            except FAILURES:
                last = line_end + failure_event(path)
                break
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                last = line_end + failure_event(path)
                break
            if not chunk:
                break
            line_end = b"" if chunk.endswith(b"\n\n") else b"\n\n"  # terminates a partial event
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    finally:
        if reading is not None:
            reading.cancel()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    await send({"type": "http.response.body", "body": last, "more_body": False})


def failure_event(path: str) -> bytes:
    """Return the event that ends a stream whose upstream failed."""
    error = RequestError("The fallback broke off.", code="fallback_failed", status=502)
    if speaks_anthropic(path):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_body(error, "")) + b"\n\n"
    return error_event(error)


def split_name(text: str) -> tuple[str, str]:
    """Split "big=http://host/v1" into ("big", "http://host/v1"); without a name ("", the text)."""
    name, equals, rest = text.partition("=")
    if equals and "/" not in name:
        if not (name and rest):
            raise UsageError(
                f"--fallback-model {text!r} is no name and place.", "Write big=http://host/v1."
            )
        return name, rest
    return "", text
