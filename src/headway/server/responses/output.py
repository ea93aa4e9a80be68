"""The items of a response while they grow, and the events that tell of them.

Given deltas it opens an item for each stretch of text, of reasoning and for each call, and closes
it when another begins. `items` is what has been said so far; `told` hands out the events since the
last time. It promises that the events add up to the items.
"""

from typing import Any

import msgspec

from headway.frontend.answer import Delta
from headway.frontend.text import Tokenizer
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Part,
    Reasoning,
)
from headway.server.openai.render import chat_logprobs
from headway.server.responses.tools import Declared, Tools, custom_input

TEXT_KINDS: dict[str, tuple[str, str, str]] = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}
"""Kind of item → its ids' prefix, the type of its part, the stem of its events."""


class Output:
    """The output of one response; `tools` stand behind the functions that are called.

    With a `tokenizer` the text comes with log-probabilities.
    """

    def __init__(self, stem: str, tools: Tools, tokenizer: Tokenizer | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._stem = stem
        self._tools = tools
        self._tokenizer = tokenizer
        self._open = ""
        """The kind of the last item while it grows, else ""."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._unsaid: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is still held back."""
        self._events: list[bytes] = []
        self._number = 0

    def tell(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        data = msgspec.json.encode(content)
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def told(self) -> bytes:
        """The events since the last time."""
        events, self._events = self._events, []
        return b"".join(events)

    # ── growing ─────────────────────────────────────────────────────────────────────────────

    def take(self, delta: Delta) -> None:
        """Add what one sequence gained."""
        if self._tokenizer is not None and delta.logprobs:
            found = chat_logprobs(self._tokenizer, delta.logprobs)
            self._unsaid += found["content"] if found else []
        for part in parts_of(delta):
            match part:
                case Content(text):
                    self._say("message", text)
                case Reasoning(text):
                    self._say("reasoning", text)
                case CallBegins():
                    self._begin_call(part)
                case CallArguments(_, text):
                    self._texts.append(text)
                    if self._open == "function_call":
                        self._tell_item("response.function_call_arguments.delta", delta=text)
                case CallEnds():
                    self._close_item("completed" if part.complete else "incomplete")

    def close(self, status: str) -> None:
        """Nothing follows; an answer without anything in it is an empty message."""
        if not self.items:
            self._say("message", "")
        self.break_off(status)

    def break_off(self, status: str = "incomplete") -> None:
        """Close the item that grows, if there is one."""
        self._close_item(status)

    def _say(self, kind: str, text: str) -> None:
        if self._open != kind:
            self._close_item("completed")
            self._open_text(kind)
        if not text:
            return
        self._texts.append(text)
        stem = TEXT_KINDS[kind][2]
        if kind == "message":
            logprobs, self._unsaid = self._unsaid, []
            self._logprobs += logprobs
            self._tell_item(f"{stem}.delta", content_index=0, delta=text, logprobs=logprobs)
        else:
            self._tell_item(f"{stem}.delta", content_index=0, delta=text)

    def _open_text(self, kind: str) -> None:
        prefix, part_type, _ = TEXT_KINDS[kind]
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        self._add(prefix, item)
        part = text_part(part_type, "", [])
        self._tell_item("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, call: CallBegins) -> None:
        self._close_item("completed")
        tool = self._tools.get(call.name, Declared(name=call.name))
        fields: dict[str, Any] = {"status": "in_progress", "call_id": call.call_id, **tool.origin}
        if tool.custom:
            self._add("ctc", {"type": "custom_tool_call", **fields, "input": ""})
        else:
            self._add("fc", {"type": "function_call", **fields, "arguments": ""})

    def _add(self, prefix: str, item: dict[str, Any]) -> None:
        """Open an item."""
        item = {"id": f"{prefix}_{self._stem}_{len(self.items)}", **item}
        self.items.append(item)
        self._open, self._texts, self._logprobs = item["type"], [], []
        self.tell("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _tell_item(self, kind: str, **fields: Any) -> None:
        """An event of the item that grows."""
        place = len(self.items) - 1
        self.tell(kind, item_id=self.items[-1]["id"], output_index=place, **fields)

    def _close_item(self, status: str) -> None:
        """Close the item that grows, if there is one."""
        if not self._open:
            return
        text, kind, item = "".join(self._texts), self._open, self.items[-1]
        self._open = ""
        if kind == "function_call":
            self._tell_item("response.function_call_arguments.done", arguments=text)
            item["arguments"] = text
        elif kind == "custom_tool_call":
            item["input"] = custom_input(text)
            self._tell_item("response.custom_tool_call_input.delta", delta=item["input"])
            self._tell_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            _, part_type, stem = TEXT_KINDS[kind]
            more = {"logprobs": self._logprobs} if kind == "message" else {}
            self._tell_item(f"{stem}.done", content_index=0, text=text, **more)
            part = text_part(part_type, text, self._logprobs)
            self._tell_item("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        self.tell("response.output_item.done", output_index=len(self.items) - 1, item=item)


def text_part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of a message or of reasoning."""
    if kind == "reasoning_text":
        return {"type": kind, "text": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}


def parts_of(delta: Delta) -> list[Part]:
    """What a delta consists of; without a parser all of its text is content."""
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []
