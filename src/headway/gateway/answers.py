"""Content of an answer in a form that is the same for all dialects, streamed or whole.

Only answers that a check reads are parsed: those of a cascade's cheap route, shadow copies and
probes. All others pass through the gateway unparsed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.gateway.dialects import Chunks, Dialect, Messages
from headway.gateway.events import Event

encode, decode = msgspec.json.encode, msgspec.json.decode
CUT_OFF_REASONS = ("length", "max_tokens", "incomplete", "max_output_tokens")
"""Finish reasons of an answer that was cut off."""
Alternatives = dict[str, float]
"""Text → log-probability of the top tokens of one position."""


@dataclass(slots=True, kw_only=True)
class AnswerContent:
    """Parsed answer. `chosen` and `top` are empty without log-probabilities."""

    text: str = ""
    ended: str = ""
    calls: bool = False
    """Whether the answer calls a tool."""
    fingerprint: str = ""
    tokens: list[str] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[Alternatives] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether the answer is not empty and was not cut off."""
        return (
            bool(self.ended)
            and self.ended not in CUT_OFF_REASONS
            and bool(self.text.strip() or self.calls)
        )

    @property
    def margin(self) -> float | None:
        """Return the smallest gap in nats between a chosen token and the best other token.

        Chosen at -0.1 with the other at -2.4, then -0.7 with the other at -0.7: 0. None without
        log-probabilities.
        """
        if not self.chosen or len(self.top) != len(self.chosen):
            return None
        return min(margin_of(own, each) for own, each in zip(self.chosen, self.top, strict=True))


def margin_of(own: float, top: Alternatives) -> float:
    """Return the gap in nats between a token and the best other one; 20 where none is known."""
    others = sorted(top.values(), reverse=True)
    if others and abs(others[0] - own) < 1e-6:
        others = others[1:]
    return own - others[0] if others else 20.0


def parse_answer(dialect: Dialect, data: bytes) -> AnswerContent:
    """Parse a whole answer; raises ValueError or an error of msgspec where it is malformed."""
    body = decode(data)
    if not isinstance(body, dict):
        raise ValueError("no object")
    content = AnswerContent(fingerprint=text_of(body.get("system_fingerprint")))
    if isinstance(dialect, Chunks):
        take_choice(content, body)
    elif isinstance(dialect, Messages):
        content.ended = text_of(body.get("stop_reason"))
        take_parts(content, body.get("content"), "tool_use")
    else:
        take_response(content, body)
    return content


def parse_stream(dialect: Dialect, events: Iterable[Event]) -> AnswerContent:
    """Parse the events of a whole stream into one answer."""
    content = AnswerContent()
    for event in events:
        if event.comment or event.data == b"[DONE]":
            continue
        body = decode(event.data)
        if not isinstance(body, dict):
            continue
        if isinstance(dialect, Chunks):
            take_choice(content, body)
        elif isinstance(dialect, Messages):
            take_message_event(content, body)
        elif isinstance(body.get("response"), dict) and body.get("type") in FINAL_EVENTS:
            take_response(content, body["response"])
    return content


FINAL_EVENTS = ("response.completed", "response.incomplete")


def take_choice(content: AnswerContent, body: dict[str, Any]) -> None:
    """Add the first choice of a chunk, or of a whole chat or completion."""
    content.fingerprint = content.fingerprint or text_of(body.get("system_fingerprint"))
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("index", 0) != 0:
        return
    message = choice.get("delta") or choice.get("message") or {}
    content.text += text_of(choice.get("text")) + text_of(message.get("content"))
    content.calls = content.calls or bool(message.get("tool_calls"))
    content.ended = text_of(choice.get("finish_reason")) or content.ended
    take_logprobs(content, choice.get("logprobs"))


def take_logprobs(content: AnswerContent, logprobs: Any) -> None:
    """Add the log-probabilities of a choice: of a chat's `content`, or a completion's lists."""
    if not isinstance(logprobs, dict):
        return
    for entry in logprobs.get("content") or ():
        content.tokens.append(text_of(entry["token"]))
        content.chosen.append(float(entry["logprob"]))
        content.top.append({e["token"]: float(e["logprob"]) for e in entry["top_logprobs"]})
    chosen, top = logprobs.get("token_logprobs") or (), logprobs.get("top_logprobs") or ()
    content.chosen += [float(each) for each in chosen if each is not None]
    content.top += [dict(each) for each in top if each is not None]


def take_message_event(content: AnswerContent, event: dict[str, Any]) -> None:
    """Add an event of /v1/messages."""
    delta = event.get("delta") if isinstance(event.get("delta"), dict) else {}
    assert isinstance(delta, dict)
    content.text += text_of(delta.get("text"))
    content.ended = text_of(delta.get("stop_reason")) or content.ended
    block = event.get("content_block")
    content.calls = content.calls or (isinstance(block, dict) and block.get("type") == "tool_use")


def take_response(content: AnswerContent, response: dict[str, Any]) -> None:
    """Add a whole response of /v1/responses."""
    content.ended = text_of(response.get("status"))
    for item in response.get("output") or ():
        content.calls = content.calls or item.get("type") == "function_call"
        take_parts(content, item.get("content"), "")


def take_parts(content: AnswerContent, parts: Any, call: str) -> None:
    """Add the text of content parts; one of the type `call` calls a tool."""
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict):
            content.text += text_of(part.get("text"))
            content.calls = content.calls or (bool(call) and part.get("type") == call)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def last_text(raw: dict[str, Any]) -> str:
    """Return the text of the last message, or of the prompt."""
    value = raw.get("messages") or raw.get("input") or raw.get("prompt")
    if isinstance(value, list) and value:
        last = value[-1]
        value = last.get("content") if isinstance(last, dict) else last
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        value = "\n".join(part for part in parts if isinstance(part, str))
    return text_of(value)


def without_logprobs(data: bytes) -> bytes:
    """Return a chat or completion in JSON without the log-probabilities."""
    body = decode(data)
    for choice in body.get("choices") or ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None
    return encode(body)
