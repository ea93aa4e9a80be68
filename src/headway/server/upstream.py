"""Another server, reached by URL, that answers what this one would refuse or answer late.

Any server of OpenAI's dialect will do. A request goes out with the model's name changed and without
the fields that only this server knows; what comes back is handed on as it is, streamed or whole. An
upstream that does not answer with 200 has not answered.
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
from headway.server.errors import anthropic_body, error_event, speaks_anthropic

log = logging.getLogger(__name__)

OURS = ("slo", "service_class", "timings")
"""Fields that mean nothing elsewhere."""
CONNECT_S, SILENCE_S = 3.0, 120.0
HANDED_ON = ("content-type", "cache-control", "x-accel-buffering")
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError)


class Upstream:
    """One upstream; `name` is the model there, found out when it is not given."""

    def __init__(self, url: str, name: str = "", key: str = "") -> None:
        self.url = url.rstrip("/")
        self.name = name
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        """The session, made in the server's loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers(),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S
                ),
                auto_decompress=True,
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if self._key:
            headers |= {"authorization": f"Bearer {self._key}", "x-api-key": self._key}
        return headers

    async def close(self) -> None:
        """Close its connections; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _model(self, asked: str) -> str:
        """The model's name there: as given, else the one asked for, else the first it serves."""
        if self.name:
            return self.name
        async with self._http().get(f"{self.url}/models") as answer:
            answer.raise_for_status()
            served = [card["id"] for card in msgspec.json.decode(await answer.read())["data"]]
        if not served:
            raise ValueError("it serves no model")
        self.name = asked if asked in served else served[0]
        return self.name

    async def answer(
        self,
        raw: dict[str, Any],
        reason: str,
        path: str,
        receive: Receive,
        send: Send,
        on_start: Callable[[], None],
    ) -> bool:
        """Ask for `raw` at `path` and hand the answer on; False when nothing was sent."""
        try:
            name = await self._model(raw["model"])
            body = {key: value for key, value in raw.items() if key not in OURS}
            data = msgspec.json.encode({**body, "model": name})
            async with self._http().post(self.url + path.removeprefix("/v1"), data=data) as answer:
                if answer.status != 200:
                    log.warning("the fallback %s answered %d", self.url, answer.status)
                    return False
                streamed = answer.content_type == "text/event-stream"
                whole = b"" if streamed else await answer.read()
                on_start()
                headers = [
                    (key.encode(), answer.headers[key].encode())
                    for key in HANDED_ON
                    if key in answer.headers
                ]
                headers.append((b"x-headway-fallback", f"{name}; reason={reason}".encode()))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if streamed:
                    await relay(answer, path, receive, send)
                else:
                    await send({"type": "http.response.body", "body": whole})
                return True
        except FAILURES as error:
            log.warning("the fallback %s does not answer: %s", self.url, error or type(error))
            return False


async def relay(answer: aiohttp.ClientResponse, path: str, receive: Receive, send: Send) -> None:
    """Hand on what comes, until it ends or the client leaves; never end a stream silently."""
    leaving = asyncio.ensure_future(departure(receive))
    last = b""
    try:
        while True:
            reading = asyncio.ensure_future(answer.content.readany())
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            try:
                chunk = reading.result()
            except FAILURES:
                last = broken(path)
                break
            if not chunk:
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    finally:
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def departure(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def broken(path: str) -> bytes:
    """The event that ends a stream which broke off upstream."""
    error = RequestError("The fallback broke off.", code="fallback_failed", status=502)
    if speaks_anthropic(path):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_body(error, "")) + b"\n\n"
    return error_event(error)


def split_name(text: str) -> tuple[str, str]:
    """ "big=http://host/v1" → ("big", "http://host/v1"); without a name ("", the text)."""
    name, equals, rest = text.partition("=")
    if equals and "/" not in name:
        if not (name and rest):
            raise UsageError(
                f"--fallback-model {text!r} is no name and place.", "Write big=http://host/v1."
            )
        return name, rest
    return "", text
