"""A question of the gateway's own to one upstream: of a judge, a calibration, a comparison."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from headway.edge.http_client import make_session, read_bounded
from headway.gateway.answers import AnswerContent, parse_answer
from headway.gateway.dialects import BAD_USAGE, DIALECTS, Usage
from headway.gateway.upstream import FAILURES, Upstream

MAX_BYTES = 2**24
CHAT = "/v1/chat/completions"
UNREADABLE = (KeyError, TypeError, AttributeError)
"""What an answer raises that is JSON and not of the API."""
FAILED = (*FAILURES, *UNREADABLE)


class BusyError(ValueError):
    """The upstream lives and has too much to do: the question may be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was said, what it took, and in which time."""

    content: AnswerContent
    usage: Usage
    seconds: float


async def ask(upstream: Upstream, model: str, raw: dict[str, Any], limit_s: float) -> Reply:
    """A whole chat's answer; raises one of FAILED, ValueError with what an error says.

    BusyError where the upstream has too much to do now.
    """
    body = msgspec.json.encode({**raw, "model": upstream.model_for(model)})
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        answer = await upstream.post(CHAT, body, {})
        async with answer:
            data = await read_bounded(answer, MAX_BYTES)
    if answer.status != 200:
        kind = BusyError if answer.status in (429, 503) else ValueError
        raise kind(f"status {answer.status}: {data[:200].decode('utf-8', 'replace')}")
    dialect = DIALECTS[CHAT]
    usage = dialect.read_whole(data) or Usage()
    if usage == BAD_USAGE:
        raise ValueError("its usage is no count of tokens")
    content = parse_answer(dialect, data)
    return Reply(content=content, usage=usage, seconds=time.monotonic() - began_s)


class ScorerClient:
    """The user's own scorers, asked at their URLs: {"task", "request", "answer"} → {"score"}."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def score(self, url: str, body: dict[str, Any], limit_s: float) -> float:
        """The score; raises one of FAILED."""
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
        """Close its connections; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class Scored(msgspec.Struct):
    """What a scorer answers."""

    score: float
