"""The answer of /v1/messages: a message of blocks, and the events of its stream.

Worked example, "Hi" and a call:

    message_start           the message without content, with the prompt's usage
    content_block_start  0  text ""            content_block_start  1  tool_use get_weather {}
    content_block_delta  0  text_delta "Hi"    content_block_delta  1  input_json_delta '{"city":'
    content_block_stop   0                     content_block_stop   1
    message_delta           stop_reason tool_use, the usage in full
    message_stop
"""

from typing import Any

import msgspec
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.edge.errors import anthropic_body, error_response
from headway.frontend.answer import SequenceDelta
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    ContentPart,
    Part,
    Reasoning,
)
from headway.server.generation import Progress
from headway.server.openai.calls import decode_object

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TEXTS: dict[type, tuple[str, str, str]] = {
    ContentPart: ("text", "text", "text_delta"),
    Reasoning: ("thinking", "thinking", "thinking_delta"),
}
"""Part → its block's type, the field of its text, the type of its deltas."""


def event(kind: str, **fields: Any) -> bytes:
    """Return one server-sent event."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class MessagesDialect:
    """Dialect of one message. `cut`: the context ends before the given `max_tokens`."""

    def __init__(self, progress: Progress, *, cut: bool) -> None:
        self.progress = progress
        self._request = progress.request
        self._cut = cut
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Texts of the open block."""
        self._open: type | None = None
        self._last_delta: SequenceDelta | None = None

    # ── stream ──────────────────────────────────────────────────────────────────────────────

    def ping(self) -> bytes:
        return event("ping")

    def opening(self, choice: int) -> bytes:
        return event("message_start", message=self._message(content=[], stop_reason=None))

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        parts = delta.parts if delta.parts is not None else [ContentPart(delta.text)]
        data = b"".join(self._append_part(part) for part in parts)
        if delta.finish_reason is not None:
            self._last_delta = delta
            data += self._close()
        return data

    def ending(self) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        timings = self.progress.timings()
        message_delta = event("message_delta", delta=delta, usage=self._usage(), **timings)
        return message_delta + event("message_stop")

    def failure(self, error: RequestError) -> bytes:
        body = anthropic_body(error, self._request.request_id)
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def refusal(self, error: RequestError) -> Response:
        return error_response(error, self._request.request_id, anthropic=True)

    # ── blocks ──────────────────────────────────────────────────────────────────────────────

    def _append_part(self, part: Part) -> bytes:
        """Add a part and return its events."""
        match part:
            case ContentPart(text) | Reasoning(text):
                return self._append_text(type(part), text) if text else b""
            case CallBegins(_, name, call_id):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._close() + self._start(CallBegins, block)
            case CallArguments(_, text):
                self._texts.append(text)
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnds():
                return self._close()

    def _append_text(self, kind: type, text: str) -> bytes:
        """Add text of one kind and return its events; a block of another kind is closed."""
        block_type, name, delta_type = TEXTS[kind]
        data = b""
        if self._open is not kind:
            block = {"type": block_type, name: ""}
            if kind is Reasoning:
                block["signature"] = ""
            data = self._close() + self._start(kind, block)
        self._texts.append(text)
        return data + self._delta({"type": delta_type, name: text})

    def _start(self, kind: type, block: dict[str, Any]) -> bytes:
        self._open, self._texts = kind, []
        self._blocks.append(block)
        return event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        """Close the open block, if any, and return its event."""
        if self._open is None:
            return b""
        text, block = "".join(self._texts), self._blocks[-1]
        if self._open is CallBegins:
            block["input"] = parse_input(text)
        else:
            block[TEXTS[self._open][1]] = text
        self._open = None
        return event("content_block_stop", index=len(self._blocks) - 1)

    # ── whole answer ────────────────────────────────────────────────────────────────────────

    def whole(self, choices: list[list[SequenceDelta]]) -> dict[str, Any]:
        for delta in choices[0]:
            self.chunk(0, delta)
        reason, sequence = self._stop()
        return self._message(content=self._blocks, stop_reason=reason, stop_sequence=sequence)

    def _stop(self) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence where one matched."""
        assert self._last_delta is not None
        finish, met = self._last_delta.finish_reason, self._last_delta.stop_reason
        if finish == "stop" and isinstance(met, str):
            return "stop_sequence", met
        if finish == "length" and self._cut:
            return "model_context_window_exceeded", None
        return STOP_REASONS.get(finish or "stop", "end_turn"), None

    def _message(
        self,
        *,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model_name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
            **(self.progress.timings() if stop_reason else {}),
        }

    def _usage(self) -> dict[str, Any]:
        """Return the token counts; Anthropic counts cached tokens apart."""
        progress, kv = self.progress, self._request.kv_usage
        return {
            "input_tokens": self._request.num_prompt_tokens - progress.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": progress.num_cached,
            "output_tokens": progress.num_generated,
            **{f"{name}_input_tokens": count for name, count in kv.items()},
        }


def parse_input(text: str) -> dict[str, Any]:
    """Parse a call's arguments; text that is no JSON object is returned under `_malformed`."""
    value = decode_object(text or "{}")
    return {"_malformed": text} if value is None else value
