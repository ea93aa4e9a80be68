"""One exchange with an OpenAI-compatible server: send a body, read its stream, time each chunk.

The result is written into the `Exchange`; a server's faults raise nothing. A chunk is timed when it
is read, and no work per token is done between the socket and that reading.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from headway.core.errors import UsageError
from headway.measure.record import Exchange

DONE = b"[DONE]"
IDLE_S = 3.0
"""Connections idle for longer are not used again: common servers close theirs after 5 s."""
FAULT_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (TimeoutError, "timeout"),
    (aiohttp.ClientConnectorError, "refused"),
    (aiohttp.ClientError, "dropped"),
    (ConnectionError, "dropped"),
    (msgspec.DecodeError, "unreadable"),
)
"""Exception → reason, the first that fits."""
MESSAGE_LENGTH = 300


class StreamDelta(msgspec.Struct, gc=False):
    """The addition of a chat chunk."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class StreamChoice(msgspec.Struct, gc=False):
    """One choice of a chunk: `text` in completions, `delta` in chat."""

    text: str | None = None
    delta: StreamDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def published(self) -> str:
        """Return the text that a user sees: no reasoning, no tool call."""
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def has_content(self) -> bool:
        """Return whether the choice holds a token: by its ids where there are any, else by text of
        any kind."""
        if self.token_ids is not None:
            return bool(self.token_ids)
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class PromptDetails(msgspec.Struct, gc=False):
    """Prompt tokens found in the cache."""

    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, gc=False):
    """The server's own token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class StreamChunk(msgspec.Struct, gc=False):
    """One event; `error` ends a failed stream."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None


decode = msgspec.json.Decoder(StreamChunk).decode


class ChunkReader:
    """Cuts bytes into chunks; `done` after the stream's last event."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> list[StreamChunk]:
        """Return the chunks that are complete now; raise msgspec.DecodeError for invalid JSON."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        chunks = []
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == DONE:
                    self.done = True
                elif payload:
                    chunks.append(decode(payload))
        return chunks


@dataclass(slots=True)
class ReceivedAnswer:
    """Text and ids of an answer, recorded only where a later turn needs them."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def open_session(api_key: str, accept: str = "text/event-stream") -> aiohttp.ClientSession:
    """Return a session without a limit of connections."""
    headers = {"content-type": "application/json", "accept": accept}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=2**18,
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


async def model_name(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that the server lists; UsageError when it cannot be reached."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            content: Any = msgspec.json.decode(await response.read())
            if response.status == 200:
                return str(content["data"][0]["id"])
            cause = f"{url}/v1/models answers {response.status}."
    except aiohttp.ClientError as error:
        raise UsageError(f"{url} cannot be reached: {error}.", "Is the server running?") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        cause = f"{url}/v1/models names no model."
    raise UsageError(cause, "Name it with --model; a key goes into --api-key.")


class Client:
    """Sends bodies to one address; `now_s` is the run's clock."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        now_s: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s
        self.now_s = now_s
        self.tokens = 0

    async def exchange(
        self, x: Exchange, data: bytes, answer: ReceivedAnswer | None = None
    ) -> None:
        """Send `data`, fill `x`, and record text and ids in `answer` where it is given."""
        x.sent_s = self.now_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post(x, data, answer)
        except (TimeoutError, aiohttp.ClientError, ConnectionError, msgspec.DecodeError) as fault:
            x.error = next(reason for kind, reason in FAULT_REASONS if isinstance(fault, kind))
            x.message = str(fault)[:MESSAGE_LENGTH]
        except asyncio.CancelledError:
            x.error = "cancelled"
            raise
        finally:
            x.ended_s = self.now_s()

    async def _post(self, x: Exchange, data: bytes, answer: ReceivedAnswer | None) -> None:
        async with self._session.post(self._url, data=data) as response:
            x.headers_s = self.now_s()
            x.status = response.status
            if response.status != 200:
                x.error = f"status {response.status}"
                x.message = (await response.text(errors="replace"))[:MESSAGE_LENGTH]
                return
            reader = ChunkReader()
            async for piece in response.content.iter_any():
                now_s = self.now_s()
                for chunk in reader.feed(piece):
                    self._take(x, chunk, now_s, answer)
            if not x.error and not reader.done and x.finish_reason is None:
                x.error = "dropped"
                x.message = "The stream ended before the answer."
            elif not x.error and not x.chunk_s:
                x.error = "empty"
                x.message = "The answer holds no token."

    def _take(
        self, x: Exchange, chunk: StreamChunk, now_s: float, answer: ReceivedAnswer | None
    ) -> None:
        """Record one chunk."""
        if chunk.error is not None:
            x.error = "error event"
            x.message = str(chunk.error)[:MESSAGE_LENGTH]
            return
        counted = None
        if chunk.usage is not None:
            if chunk.choices:  # continuous usage: how many tokens this chunk brought
                counted = chunk.usage.completion_tokens - (x.output_tokens or 0)
            x.prompt_tokens = chunk.usage.prompt_tokens
            x.output_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                x.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            x.finish_reason = choice.finish_reason or x.finish_reason
            if not choice.has_content:
                continue
            if choice.token_ids is not None:
                counted = len(choice.token_ids)
            self._count(x, counted)
            x.chunk_s.append(now_s)
            if x.published_s is None and choice.published:
                x.published_s = now_s
            if answer is not None:
                answer.pieces.append(choice.published)
                answer.token_ids += choice.token_ids or ()

    def _count(self, x: Exchange, counted: int | None) -> None:
        """Record the tokens of a chunk; one chunk without a number makes all of them unknown."""
        self.tokens += 1 if counted is None else counted
        if not x.chunk_s:
            x.chunk_tokens = None if counted is None else [counted]
        elif x.chunk_tokens is not None:
            if counted is None:
                x.chunk_tokens = None
            else:
                x.chunk_tokens.append(counted)
