"""How a stream is known to its client, how it ends when it fails, and how its text goes on."""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.errors import anthropic_body, error_event
from headway.gateway.dialects import Dialect, Messages, Responses, Usage
from headway.gateway.events import Event
from headway.gateway.incoming import Incoming
from headway.gateway.state import State
from headway.gateway.upstream import Upstream

encode = msgspec.json.encode
Identity = tuple[str, int]


class Known(msgspec.Struct, gc=False):
    """What a stream is known by, wherever a dialect has it."""

    id: str = ""
    created: int | None = None
    created_at: int | None = None
    response: "Known | None" = None
    message: "Known | None" = None


decode = msgspec.json.Decoder(Known).decode


def identity_of(dialect: Dialect, event: Event) -> Identity | None:
    """(id, time) of a stream, from its first event; None where that does not say."""
    try:
        body = decode(event.data)
    except msgspec.MsgspecError:
        return None
    inner = body.response or body.message or body
    return (inner.id, inner.created or inner.created_at or 0) if inner.id else None


class Ending:
    """What is the gateway's own in a stream: its identity, its failure, its usage."""

    def __init__(self, incoming: Incoming) -> None:
        self._dialect = incoming.dialect
        self._model = incoming.model
        self._request_id = incoming.request_id
        self.identity: Identity | None = None
        self.data: bytes | None = None
        """The last bytes of a complete stream, which wait for the books."""
        self._is_stored = incoming.raw.get("store") is not False

    @property
    def ping(self) -> bytes:
        """What breaks a silence, where a comment is not what clients expect."""
        if isinstance(self._dialect, Messages):
            return b'event: ping\ndata: {"type":"ping"}\n\n'
        return b""

    def is_after(self, event: Event) -> bool:
        """Whether an event that shows something comes without a mark: how a message ended."""
        return isinstance(self._dialect, Messages) and event.name == b"message_delta"

    def as_before(self, event: Event) -> list[tuple[bytes, bytes]]:
        """What is replaced in a stream that goes on, so that it is known by the same id."""
        now = identity_of(self._dialect, event)
        if now is None or self.identity is None or now[0] == self.identity[0]:
            return []
        return [(b'"id":' + encode(now[0]), b'"id":' + encode(self.identity[0]))]

    def note_opening(
        self, event: Event, upstream: Upstream, state: State, incoming: Incoming
    ) -> None:
        """Remember which upstream keeps a response that begins."""
        if isinstance(self._dialect, Responses) and self._is_stored and self.identity is not None:
            state.keep_response(self.identity[0], incoming.owner, upstream.name)

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream which cannot go on."""
        if isinstance(self._dialect, Messages):
            body = anthropic_body(error, self._request_id)
            return b"event: error\ndata: " + encode(body) + b"\n\n"
        if isinstance(self._dialect, Responses):
            content = {"type": "error", "code": error.code, "message": str(error), "param": None}
            return b"event: error\ndata: " + encode(content) + b"\n\n"
        return error_event(error)

    def chunk(self, used: Usage | None) -> bytes:
        """A last chunk of our own: the usage where the upstream's is lost, or without it that the
        text of the answer was gone on with by another upstream."""
        chat = self._dialect.path == "/v1/chat/completions"
        name, created = self.identity or (f"chatcmpl-{self._request_id}", 0)
        content: dict[str, Any] = {
            "id": name,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": self._model,
            "choices": [],
        }
        if used is None:
            content["headway"] = {"resumed": "text"}
        else:
            content["usage"] = {
                "prompt_tokens": used.prompt,
                "completion_tokens": used.output,
                "total_tokens": used.prompt + used.output,
            }
        return b"data: " + encode(content) + b"\n\n"


def continued(raw: dict[str, Any], text: str) -> dict[str, Any] | None:
    """The body that asks for what follows `text`; None where there is no such body."""
    if not text:
        return raw
    prompt, messages = raw.get("prompt"), raw.get("messages")
    if isinstance(prompt, str):
        return {**raw, "prompt": prompt + text}
    chat = isinstance(messages, list) and "max_tokens_to_sample" not in raw
    if not chat or raw.get("tools") or raw.get("response_format") or raw.get("n") not in (None, 1):
        return None
    return {
        **raw,
        "messages": [*(messages or []), {"role": "assistant", "content": text}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
