"""A fast reader of server-sent events that carry OpenAI's chunks.

Bytes in, decoded chunks out. Only `data:` lines are used; comments, blank lines and other fields
are skipped, and an event may be cut anywhere between two reads.
"""

from typing import Any

import msgspec

DONE = b"[DONE]"


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
