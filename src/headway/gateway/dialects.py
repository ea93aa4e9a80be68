"""What the gateway reads of the generation endpoints of each dialect.

Of a body: the prompt's bytes, the maximum answer length, required features. Of an answer: whether
an event shows content, ends the stream, or carries usage or an error. All else passes unread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from headway.gateway.bodies import prompt_bytes, prompts_of
from headway.gateway.events import Event

encode = msgspec.json.encode
NOTHING = msgspec.Raw(b"null")
"""An absent field: in a union with None, msgspec.Raw would accept only null."""
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class UpstreamUsage(NamedTuple):
    """Usage as an upstream reported it; `cached` tokens are part of `prompt`."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


BAD_USAGE = UpstreamUsage(-1, -1, -1)
"""Marker for malformed usage: a count that is negative, not an integer, or too large."""
Count = Annotated[int, Meta(ge=0, le=2**40)]


class EventClass(NamedTuple):
    """Class of an event: `content` if a client sees a token by it, `end` if it is the last.

    `hidden` marks an event that the client did not request; `text` is its part of the answer.
    """

    content: bool = False
    end: bool = False
    finished: bool = False
    hidden: bool = False
    text: str = ""
    size: int = 0
    usage: UpstreamUsage | None = None
    error: bool = False


class UsageDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class ChatUsage(msgspec.Struct, gc=False):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: UsageDetails | None = None

    def to_usage(self, before: UpstreamUsage | None) -> UpstreamUsage:
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details is not None else 0
        return UpstreamUsage(self.prompt_tokens, cached or 0, self.completion_tokens)


class UpstreamDelta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = NOTHING
    function_call: msgspec.Raw = NOTHING


class UpstreamChoice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: UpstreamDelta | None = None
    finish_reason: str | None = None


class UpstreamChunk(msgspec.Struct, gc=False):
    choices: list[UpstreamChoice] = []
    usage: msgspec.Raw = NOTHING
    error: msgspec.Raw = NOTHING


class WholeChat(msgspec.Struct, gc=False):
    choices: list[msgspec.Raw] | None = None
    data: list[msgspec.Raw] | None = None
    """Present in an answer of /v1/embeddings."""
    usage: msgspec.Raw = NOTHING
    error: msgspec.Raw = NOTHING


class ResponseUsage(msgspec.Struct, gc=False):
    input_tokens: Count = 0
    output_tokens: Count = 0
    input_tokens_details: UsageDetails | None = None

    def to_usage(self, before: UpstreamUsage | None) -> UpstreamUsage:
        details = self.input_tokens_details
        cached = details.cached_tokens if details is not None else 0
        return UpstreamUsage(self.input_tokens, cached or 0, self.output_tokens)


class Response(msgspec.Struct, gc=False):
    id: str = ""
    status: str = ""
    usage: msgspec.Raw = NOTHING


class ResponseEvent(msgspec.Struct, gc=False):
    type: str
    delta: Any = None
    response: Response | None = None


class MessageUsage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    def to_usage(self, before: UpstreamUsage | None) -> UpstreamUsage:
        """Return the usage so far, given that of `message_start`."""
        was = before or UpstreamUsage()
        if self.input_tokens is None:
            return UpstreamUsage(was.prompt, was.cached, self.output_tokens or was.output)
        cached = self.cache_read_input_tokens or 0
        prompt = self.input_tokens + cached + (self.cache_creation_input_tokens or 0)
        return UpstreamUsage(prompt, cached, self.output_tokens or 0)


class UpstreamMessage(msgspec.Struct, gc=False):
    usage: msgspec.Raw = NOTHING
    content: list[msgspec.Raw] | None = None
    type: str = ""


class TextDelta(msgspec.Struct, gc=False):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class MessageEvent(msgspec.Struct, gc=False):
    type: str
    delta: TextDelta | None = None
    message: UpstreamMessage | None = None
    usage: msgspec.Raw = NOTHING


class WireUsage(Protocol):
    """Usage as one of the dialects encodes it."""

    def to_usage(self, before: UpstreamUsage | None) -> UpstreamUsage: ...


def usage_of(
    raw: msgspec.Raw,
    decode: Callable[[msgspec.Raw], WireUsage],
    before: UpstreamUsage | None = None,
) -> UpstreamUsage | None:
    """Return the usage in this JSON, after `before`: None for null, BAD_USAGE if malformed."""
    if raw == NOTHING:
        return None
    if before == BAD_USAGE:
        return before
    try:
        return decode(raw).to_usage(before)
    except MALFORMED:
        return BAD_USAGE


decode_chunk = msgspec.json.Decoder(UpstreamChunk).decode
decode_whole_chat = msgspec.json.Decoder(WholeChat).decode
decode_response_event = msgspec.json.Decoder(ResponseEvent).decode
decode_response = msgspec.json.Decoder(Response).decode
decode_message_event = msgspec.json.Decoder(MessageEvent).decode
decode_message = msgspec.json.Decoder(UpstreamMessage).decode
decode_chat_usage = msgspec.json.Decoder(ChatUsage).decode
decode_response_usage = msgspec.json.Decoder(ResponseUsage).decode
decode_message_usage = msgspec.json.Decoder(MessageUsage).decode


# ── OpenAI's chunks ─────────────────────────────────────────────────────────────────────────

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Chunks:
    """/v1/chat/completions and /v1/completions; `prompt` lists fields in the template's order."""

    path: str
    prompt: tuple[str, ...]
    lengths: tuple[str, ...]

    def prompt_bytes(self, raw: dict[str, Any]) -> bytes:
        """Return the bytes that a prefix cache compares, in the template's order."""
        return prompt_bytes(raw, self.prompt)

    def num_prompts(self, raw: dict[str, Any]) -> int:
        """Return the number of prompts."""
        return len(prompts_of(raw.get("prompt")))

    def num_answers(self, raw: dict[str, Any]) -> int:
        """Return the number of answers to compute."""
        return self.num_prompts(raw) * max(1, raw.get("n") or 1, raw.get("best_of") or 1)

    def asks_for_usage(self, raw: dict[str, Any]) -> bool:
        """Return whether the client requested usage in its stream."""
        options = raw.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def with_usage(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a stream that ends with usage."""
        given = raw.get("stream_options")
        options = given if isinstance(given, dict) else {}
        return {**raw, "stream_options": {**options, "include_usage": True}}

    def read(self, event: Event, before: UpstreamUsage | None) -> EventClass:
        """Classify a chunk; raises one of MALFORMED."""
        if event.data == DONE:
            return EventClass(end=True)
        chunk = decode_chunk(event.data)
        usage = usage_of(chunk.usage, decode_chat_usage)
        text, size, finished = "", 0, False
        for choice in chunk.choices:
            delta = choice.delta
            piece = choice.text or (delta.content if delta is not None else None) or ""
            text += piece
            size += len(piece)
            if delta is not None:
                thought = delta.reasoning or delta.reasoning_content or delta.refusal or ""
                size += len(thought)
                for calls in (delta.tool_calls, delta.function_call):
                    size += len(calls) if calls != NOTHING else 0
            finished = finished or choice.finish_reason is not None
        hidden = not chunk.choices and usage is not None
        is_error = chunk.error != NOTHING
        return EventClass(
            size > 0 or finished, False, finished, hidden, text, size, usage, is_error
        )

    def read_whole(self, data: bytes) -> UpstreamUsage | None:
        """Return the usage of a whole answer; ValueError if it is an error."""
        whole = decode_whole_chat(data)
        if whole.error != NOTHING or whole.choices is None:
            raise ValueError("an error in place of an answer")
        return usage_of(whole.usage, decode_chat_usage)

    def may_resume(self, raw: dict[str, Any]) -> bool:
        """Return whether a Headway server can resume a stream of this request."""
        plain = not raw.get("logprobs") and raw.get("prompt_logprobs") is None
        return plain and self.num_answers(raw) == 1


@dataclass(frozen=True, slots=True)
class Embeddings(Chunks):
    """/v1/embeddings: prompts without answers, never streamed."""

    def num_prompts(self, raw: dict[str, Any]) -> int:
        return len(prompts_of(raw.get("input")))

    def num_answers(self, raw: dict[str, Any]) -> int:
        return 0

    def read_whole(self, data: bytes) -> UpstreamUsage | None:
        whole = decode_whole_chat(data)
        if whole.error != NOTHING or whole.data is None:
            raise ValueError("an error in place of an answer")
        return usage_of(whole.usage, decode_chat_usage)


# ── Responses ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SingleAnswerDialect:
    """Common part of dialects with one prompt and one answer, whose streams always have usage."""

    def num_prompts(self, raw: dict[str, Any]) -> int:
        return 1

    def num_answers(self, raw: dict[str, Any]) -> int:
        return 1

    def asks_for_usage(self, raw: dict[str, Any]) -> bool:
        return True

    def with_usage(self, raw: dict[str, Any]) -> dict[str, Any]:
        return raw


@dataclass(frozen=True, slots=True)
class Responses(SingleAnswerDialect):
    """/v1/responses."""

    path: str = "/v1/responses"
    lengths: tuple[str, ...] = ("max_output_tokens",)

    def prompt_bytes(self, raw: dict[str, Any]) -> bytes:
        return prompt_bytes(raw, ("tools", "instructions", "input"))

    def read(self, event: Event, before: UpstreamUsage | None) -> EventClass:
        if event.data == DONE:
            return EventClass(hidden=True)
        payload = decode_response_event(event.data)
        kind = payload.type
        if kind in ("error", "response.failed"):
            return EventClass(error=True)
        counts = payload.response.usage if payload.response is not None else NOTHING
        delta = payload.delta if isinstance(payload.delta, str) else ""
        return EventClass(
            content=kind not in ("response.created", "response.in_progress", "response.queued"),
            end=kind in ("response.completed", "response.incomplete"),
            text=delta if kind == "response.output_text.delta" else "",
            size=len(delta),
            usage=usage_of(counts, decode_response_usage),
        )

    def read_whole(self, data: bytes) -> UpstreamUsage | None:
        whole = decode_response(data)
        if not whole.id or whole.status in ("", "failed"):
            raise ValueError("an error in place of an answer")
        return usage_of(whole.usage, decode_response_usage)

    def id_of(self, data: bytes) -> str:
        """Return the id of a whole response."""
        return decode_response(data).id

    def may_resume(self, raw: dict[str, Any]) -> bool:
        logprobs = raw.get("top_logprobs") or raw.get("include")
        return not (logprobs or raw.get("background"))


# ── Messages ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Messages(SingleAnswerDialect):
    """/v1/messages."""

    path: str = "/v1/messages"
    lengths: tuple[str, ...] = ("max_tokens",)

    def prompt_bytes(self, raw: dict[str, Any]) -> bytes:
        return prompt_bytes(raw, ("tools", "system", "messages"))

    def read(self, event: Event, before: UpstreamUsage | None) -> EventClass:
        payload = decode_message_event(event.data)
        kind = payload.type
        if kind in ("error", "ping"):
            return EventClass(error=kind == "error", hidden=True)
        counts = payload.message.usage if payload.message is not None else payload.usage
        delta = payload.delta
        text = delta.text if delta is not None else None
        other = (delta.thinking or delta.partial_json or "") if delta is not None else ""
        return EventClass(
            content=kind != "message_start",
            end=kind == "message_stop",
            text=text or "",
            size=len(text or other),
            usage=usage_of(counts, decode_message_usage, before),
        )

    def read_whole(self, data: bytes) -> UpstreamUsage | None:
        whole = decode_message(data)
        if whole.content is None or whole.type == "error":
            raise ValueError("an error in place of an answer")
        return usage_of(whole.usage, decode_message_usage)

    def may_resume(self, raw: dict[str, Any]) -> bool:
        return True


Dialect = Chunks | Responses | Messages
DIALECTS: dict[str, Dialect] = {
    each.path: each
    for each in (
        Chunks(
            "/v1/chat/completions",
            ("tools", "messages"),
            ("max_completion_tokens", "max_tokens", "n_predict"),
        ),
        Chunks("/v1/completions", ("prompt",), ("max_tokens", "n_predict")),
        Responses(),
        Messages(),
        Embeddings("/v1/embeddings", ("input",), ()),
    )
}
