"""An answer as checks see it, whatever its dialect, streamed or whole: what it says, how it ended.

Only answers that are looked at come here, those of a cascade's cheap route, of copies and probes;
all others pass the gateway without being taken apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.gateway.dialects import Chunks, Dialect, Messages
from headway.gateway.events import Event

encode, decode = msgspec.json.encode, msgspec.json.decode
CUT = ("length", "max_tokens", "incomplete", "max_output_tokens")
"""How an answer ends that has not come to its end."""
Alternatives = dict[str, float]
"""Log-probabilities of the likeliest tokens of one position, by text."""


@dataclass(slots=True, kw_only=True)
class AnswerContent:
    """What an answer says. `chosen` and `top` are empty where no log-probabilities are told."""

    text: str = ""
    ended: str = ""
    calls: bool = False
    """Whether it calls a tool."""
    fingerprint: str = ""
    tokens: list[str] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[Alternatives] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether it says something and has come to its end."""
        return bool(self.ended) and self.ended not in CUT and bool(self.text.strip() or self.calls)

    @property
    def margin(self) -> float | None:
        """The least gap in nats between the token that was chosen and the likeliest other one.

        Chosen at -0.1 beside one at -2.4, then -0.7 beside one at -0.7: 0. None without
        log-probabilities.
        """
        if not self.chosen or len(self.top) != len(self.chosen):
            return None
        return min(gap(own, each) for own, each in zip(self.chosen, self.top, strict=True))


def gap(own: float, top: Alternatives) -> float:
    """By how much a token is likelier than the likeliest of the others; 20 where none is told."""
    others = sorted(top.values(), reverse=True)
    if others and abs(others[0] - own) < 1e-6:
        others = others[1:]
    return own - others[0] if others else 20.0


def parse_answer(dialect: Dialect, data: bytes) -> AnswerContent:
    """What a whole answer says; raises ValueError or msgspec's errors where it is none."""
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
    """What a whole stream's events say, together."""
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
        elif isinstance(body.get("response"), dict) and body.get("type") in ENDS:
            take_response(content, body["response"])
    return content


ENDS = ("response.completed", "response.incomplete")


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
    """The text of what was asked last: the last message's, or the prompt."""
    value = raw.get("messages") or raw.get("input") or raw.get("prompt")
    if isinstance(value, list) and value:
        last = value[-1]
        value = last.get("content") if isinstance(last, dict) else last
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        value = "\n".join(part for part in parts if isinstance(part, str))
    return text_of(value)


def without_logprobs(data: bytes) -> bytes:
    """A chat's or completion's JSON without the log-probabilities that its client did not want."""
    body = decode(data)
    for choice in body.get("choices") or ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None
    return encode(body)
