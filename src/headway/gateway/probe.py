"""Requests of the gateway itself to one upstream: for a judge, a calibration, a drift check."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from headway.core.errors import RequestError
from headway.edge.http_client import make_session, read_bounded
from headway.gateway.answers import AnswerContent, parse_answer
from headway.gateway.dialects import BAD_USAGE, DIALECTS, UpstreamUsage
from headway.gateway.providers import CHAT
from headway.gateway.translation import Translator, translator_of
from headway.gateway.upstream import FAILURES, Upstream

MAX_BYTES = 2**24
UNREADABLE = (KeyError, TypeError, AttributeError)
"""Exceptions of an answer that is JSON but not of the API."""
PROBE_FAILURES = (*FAILURES, *UNREADABLE)


class BusyError(ValueError):
    """The upstream is overloaded; the request may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of an upstream, its usage, and its duration in seconds."""

    content: AnswerContent
    usage: UpstreamUsage
    seconds: float


async def ask(upstream: Upstream, model: str, raw: dict[str, Any], limit_s: float) -> Reply:
    """Ask for a whole chat; raises one of PROBE_FAILURES, ValueError with the text of an error.

    Raises BusyError if the upstream is overloaded.
    """
    translator = translator_of(CHAT, upstream.speaks, model)
    path, sent = probe_request({**raw, "model": upstream.model_for(model)}, translator)
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        answer = await upstream.post(path, sent, {})
        async with answer:
            data = await read_bounded(answer, MAX_BYTES)
    if answer.status != 200:
        kind = BusyError if answer.status in (429, 503) else ValueError
        raise kind(f"status {answer.status}: {data[:200].decode('utf-8', 'replace')}")
    data = data if translator is None else translator.whole(data)
    dialect = DIALECTS[CHAT]
    usage = dialect.read_whole(data) or UpstreamUsage()
    if usage == BAD_USAGE:
        raise ValueError("its usage is no count of tokens")
    content = parse_answer(dialect, data)
    return Reply(content=content, usage=usage, seconds=time.monotonic() - began_s)


def probe_request(body: dict[str, Any], translator: Translator | None) -> tuple[str, bytes]:
    """Return the path and the body of a chat; ValueError for what has no translation."""
    if translator is None:
        return CHAT, msgspec.json.encode(body)
    try:
        return translator.path, msgspec.json.encode(translator.request(body))
    except RequestError as error:
        raise ValueError(str(error)) from error


class ScorerClient:
    """Client of the operator's scorers: POST {"task", "request", "answer"} → {"score"}."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def score(self, url: str, body: dict[str, Any], limit_s: float) -> float:
        """Return the score; raises one of PROBE_FAILURES."""
        if self._session is None:
            self._session = make_session({}, aiohttp.ClientTimeout())
        data = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        async with (
            asyncio.timeout(limit_s),
            self._session.post(url, data=data, headers=headers, allow_redirects=False) as answer,
        ):
            reply = await read_bounded(answer, MAX_BYTES)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        return msgspec.json.decode(reply, type=Scored).score

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class Scored(msgspec.Struct):
    """Body of a scorer's answer."""

    score: float
