"""The items of a response under construction, and the events of their stream.

Each run of text or reasoning and each call is an item, which is closed when the next one opens.
`items` is the state, `drain_events` returns the new events; the events add up to the items.
"""

from typing import Any

import msgspec

from headway.frontend.answer import SequenceDelta
from headway.frontend.text import Tokenizer
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    ContentPart,
    Part,
    Reasoning,
)
from headway.server.openai.render import chat_logprobs
from headway.server.responses.tools import DeclaredTool, Tools, custom_input

TEXT_KINDS: dict[str, tuple[str, str, str]] = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}
"""Kind of item → prefix of its ids, type of its part, stem of its events."""


class Output:
    """The output of one response; `tools` are the client's tools by the called function's name.

    With a `tokenizer` the text has log-probabilities.
    """

    def __init__(self, stem: str, tools: Tools, tokenizer: Tokenizer | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._stem = stem
        self._tools = tools
        self._tokenizer = tokenizer
        self._open = ""
        """Kind of the open item, else ""."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._pending_logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is not shown yet."""
        self._events: list[bytes] = []
        self._number = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        data = msgspec.json.encode(content)
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def drain_events(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return b"".join(events)

    # ── items ───────────────────────────────────────────────────────────────────────────────

    def append_delta(self, delta: SequenceDelta) -> None:
        """Add a delta of the answer."""
        if self._tokenizer is not None and delta.logprobs:
            logprobs = chat_logprobs(self._tokenizer, delta.logprobs)
            self._pending_logprobs += logprobs["content"] if logprobs else []
        for part in parts_of(delta):
            match part:
                case ContentPart(text):
                    self._append_text("message", text)
                case Reasoning(text):
                    self._append_text("reasoning", text)
                case CallBegins():
                    self._begin_call(part)
                case CallArguments(_, text):
                    self._texts.append(text)
                    if self._open == "function_call":
                        self._emit_item("response.function_call_arguments.delta", delta=text)
                case CallEnds():
                    self._close_item("completed" if part.complete else "incomplete")

    def close(self, status: str) -> None:
        """End the output; an answer without items gets an empty message."""
        if not self.items:
            self._append_text("message", "")
        self.close_item(status)

    def close_item(self, status: str = "incomplete") -> None:
        """Close the open item, if any."""
        self._close_item(status)

    def _append_text(self, kind: str, text: str) -> None:
        if self._open != kind:
            self._close_item("completed")
            self._open_text(kind)
        if not text:
            return
        self._texts.append(text)
        stem = TEXT_KINDS[kind][2]
        if kind == "message":
            logprobs, self._pending_logprobs = self._pending_logprobs, []
            self._logprobs += logprobs
            self._emit_item(f"{stem}.delta", content_index=0, delta=text, logprobs=logprobs)
        else:
            self._emit_item(f"{stem}.delta", content_index=0, delta=text)

    def _open_text(self, kind: str) -> None:
        prefix, part_type, _ = TEXT_KINDS[kind]
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        self._open_item(prefix, item)
        part = text_part(part_type, "", [])
        self._emit_item("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, call: CallBegins) -> None:
        self._close_item("completed")
        tool = self._tools.get(call.name, DeclaredTool(name=call.name))
        fields: dict[str, Any] = {"status": "in_progress", "call_id": call.call_id, **tool.origin}
        if tool.custom:
            self._open_item("ctc", {"type": "custom_tool_call", **fields, "input": ""})
        else:
            self._open_item("fc", {"type": "function_call", **fields, "arguments": ""})

    def _open_item(self, prefix: str, item: dict[str, Any]) -> None:
        """Open an item."""
        item = {"id": f"{prefix}_{self._stem}_{len(self.items)}", **item}
        self.items.append(item)
        self._open, self._texts, self._logprobs = item["type"], [], []
        self.emit("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        """Append an event of the open item."""
        place = len(self.items) - 1
        self.emit(kind, item_id=self.items[-1]["id"], output_index=place, **fields)

    def _close_item(self, status: str) -> None:
        """Close the open item, if any."""
        if not self._open:
            return
        text, kind, item = "".join(self._texts), self._open, self.items[-1]
        self._open = ""
        if kind == "function_call":
            self._emit_item("response.function_call_arguments.done", arguments=text)
            item["arguments"] = text
        elif kind == "custom_tool_call":
            item["input"] = custom_input(text)
            self._emit_item("response.custom_tool_call_input.delta", delta=item["input"])
            self._emit_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            _, part_type, stem = TEXT_KINDS[kind]
            more = {"logprobs": self._logprobs} if kind == "message" else {}
            self._emit_item(f"{stem}.done", content_index=0, text=text, **more)
            part = text_part(part_type, text, self._logprobs)
            self._emit_item("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        self.emit("response.output_item.done", output_index=len(self.items) - 1, item=item)


def text_part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one part of a message or of reasoning."""
    if kind == "reasoning_text":
        return {"type": kind, "text": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}


def parts_of(delta: SequenceDelta) -> list[Part]:
    """Return the parts of a delta; without a parser all of its text is content."""
    if delta.parts is not None:
        return delta.parts
    return [ContentPart(delta.text)] if delta.text else []
