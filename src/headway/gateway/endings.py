"""Parts of a stream that the gateway writes itself: identity, failure, usage, continuation."""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.errors import anthropic_body, error_event
from headway.gateway.dialects import Dialect, Messages, Responses, UpstreamUsage
from headway.gateway.events import Event
from headway.gateway.incoming import GatewayRequest
from headway.gateway.state import GatewayState
from headway.gateway.upstream import Upstream

encode = msgspec.json.encode
Identity = tuple[str, int]


class IdentityFields(msgspec.Struct, gc=False):
    """Fields that identify a stream, in any dialect."""

    id: str = ""
    created: int | None = None
    created_at: int | None = None
    response: "IdentityFields | None" = None
    message: "IdentityFields | None" = None


decode = msgspec.json.Decoder(IdentityFields).decode


def identity_of(dialect: Dialect, event: Event) -> Identity | None:
    """Return (id, time) of a stream from its first event; None if the event has no id."""
    try:
        body = decode(event.data)
    except msgspec.MsgspecError:
        return None
    inner = body.response or body.message or body
    return (inner.id, inner.created or inner.created_at or 0) if inner.id else None


class Ending:
    """Parts of one stream that the gateway writes."""

    def __init__(self, incoming: GatewayRequest) -> None:
        self._dialect = incoming.dialect
        self._model = incoming.shown_model
        self._request_id = incoming.request_id
        self.identity: Identity | None = None
        self.data: bytes | None = None
        """The last bytes of a complete stream, which are sent after the ledger has its row."""
        self._is_stored = incoming.raw.get("store") is not False

    @property
    def ping(self) -> bytes:
        """Return the bytes of a keep-alive, for dialects whose clients do not expect a comment."""
        if isinstance(self._dialect, Messages):
            return b'event: ping\ndata: {"type":"ping"}\n\n'
        return b""

    def is_unmarked_content(self, event: Event) -> bool:
        """Return whether the event shows content without a mark: the end of a message."""
        return isinstance(self._dialect, Messages) and event.name == b"message_delta"

    def identity_replacements(self, event: Event) -> list[tuple[bytes, bytes]]:
        """Return the replacements that keep the first id in a resumed stream."""
        now = identity_of(self._dialect, event)
        if now is None or self.identity is None or now[0] == self.identity[0]:
            return []
        return [(b'"id":' + encode(now[0]), b'"id":' + encode(self.identity[0]))]

    def note_opening(
        self, event: Event, upstream: Upstream, state: GatewayState, incoming: GatewayRequest
    ) -> None:
        """Remember which upstream stores the response that begins with this event."""
        if isinstance(self._dialect, Responses) and self._is_stored and self.identity is not None:
            state.keep_response(self.identity[0], incoming.owner, upstream.name)

    def failure(self, error: RequestError) -> bytes:
        """Return the event that ends a failed stream."""
        if isinstance(self._dialect, Messages):
            body = anthropic_body(error, self._request_id)
            return b"event: error\ndata: " + encode(body) + b"\n\n"
        if isinstance(self._dialect, Responses):
            content = {"type": "error", "code": error.code, "message": str(error), "param": None}
            return b"event: error\ndata: " + encode(content) + b"\n\n"
        return error_event(error)

    def chunk(self, used: UpstreamUsage | None) -> bytes:
        """Return a last chunk of the gateway: the usage, where the upstream's is lost.

        Without `used` it says that another upstream continued the text of the answer.
        """
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


def continuation_body(raw: dict[str, Any], text: str) -> dict[str, Any] | None:
    """Return the body that requests the continuation of `text`; None if that is not possible."""
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
