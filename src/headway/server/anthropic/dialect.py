"""How /v1/messages answers: a message of blocks, and the events that tell how it grows.

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
from headway.frontend.answer import Delta
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Part,
    Reasoning,
)
from headway.server.generation import Progress

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TEXTS: dict[type, tuple[str, str, str]] = {
    Content: ("text", "text", "text_delta"),
    Reasoning: ("thinking", "thinking", "thinking_delta"),
}
"""Part → its block's type, the field of its text, the type of its deltas."""


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class MessagesDialect:
    """One message. `cut`: the context ends before the `max_tokens` that were asked for."""

    def __init__(self, progress: Progress, *, cut: bool) -> None:
        self.progress = progress
        self._request = progress.request
        self._cut = cut
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """The text of the last block while it grows."""
        self._open: type | None = None
        self._last: Delta | None = None

    # ── the stream ──────────────────────────────────────────────────────────────────────────

    def ping(self) -> bytes:
        return event("ping")

    def opening(self, choice: int) -> bytes:
        return event("message_start", message=self._message(content=[], stop_reason=None))

    def chunk(self, choice: int, delta: Delta) -> bytes:
        parts = delta.parts if delta.parts is not None else [Content(delta.text)]
        data = b"".join(self._take(part) for part in parts)
        if delta.finish_reason is not None:
            self._last = delta
            data += self._close()
        return data

    def ending(self) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        timings = self.progress.timings()
        told = event("message_delta", delta=delta, usage=self._usage(), **timings)
        return told + event("message_stop")

    def failure(self, error: RequestError) -> bytes:
        body = anthropic_body(error, self._request.request_id)
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def refusal(self, error: RequestError) -> Response:
        return error_response(error, self._request.request_id, anthropic=True)

    # ── growing ─────────────────────────────────────────────────────────────────────────────

    def _take(self, part: Part) -> bytes:
        """Add a part; the events that tell of it."""
        match part:
            case Content(text) | Reasoning(text):
                return self._say(type(part), text) if text else b""
            case CallBegins(_, name, call_id):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._close() + self._start(CallBegins, block)
            case CallArguments(_, text):
                self._pieces.append(text)
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnds():
                return self._close()

    def _say(self, kind: type, text: str) -> bytes:
        """Text of one kind; a block of another is closed."""
        block_type, name, delta_type = TEXTS[kind]
        data = b""
        if self._open is not kind:
            block = {"type": block_type, name: ""}
            if kind is Reasoning:
                block["signature"] = ""
            data = self._close() + self._start(kind, block)
        self._pieces.append(text)
        return data + self._delta({"type": delta_type, name: text})

    def _start(self, kind: type, block: dict[str, Any]) -> bytes:
        self._open, self._pieces = kind, []
        self._blocks.append(block)
        return event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        """Close the block that grows, if there is one."""
        if self._open is None:
            return b""
        text, block = "".join(self._pieces), self._blocks[-1]
        if self._open is CallBegins:
            block["input"] = parsed_input(text)
        else:
            block[TEXTS[self._open][1]] = text
        self._open = None
        return event("content_block_stop", index=len(self._blocks) - 1)

    # ── the whole ───────────────────────────────────────────────────────────────────────────

    def whole(self, choices: list[list[Delta]]) -> dict[str, Any]:
        for delta in choices[0]:
            self.chunk(0, delta)
        reason, sequence = self._stop()
        return self._message(content=self._blocks, stop_reason=reason, stop_sequence=sequence)

    def _stop(self) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence where one was met."""
        assert self._last is not None
        finish, met = self._last.finish_reason, self._last.stop_reason
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
        """Tokens so far; Anthropic counts what came from a cache apart."""
        progress, kv = self.progress, self._request.kv_usage
        return {
            "input_tokens": self._request.num_prompt_tokens - progress.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": progress.num_cached,
            "output_tokens": progress.num_generated,
            **{f"{name}_input_tokens": count for name, count in kv.items()},
        }


def parsed_input(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what the model wrote amiss is shown as it is."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        value = None
    return value if isinstance(value, dict) else {"_malformed": text}
