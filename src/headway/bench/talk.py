"""Request bodies of a conversation: prompts as ids, as text, or as chat messages.

A `ConversationWriter` holds all earlier turns. `add_turn` adds a turn and returns the body that
sends it, `add_answer` adds the answer, so that the next turn sends the whole conversation as a chat
client does.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway.bench.prompts import GeneratedPiece, IdWriter, WordWriter, body, num_tokens
from headway.bench.workload import Turn
from headway.measure.client import ReceivedAnswer

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class ConversationWriter(Protocol):
    """One conversation in one dialect."""

    def add_turn(self, turn: Turn) -> bytes:
        """Add a turn and return the prompt or the messages as JSON."""
        ...

    def add_answer(self, answer: ReceivedAnswer, tokens: int) -> None:
        """Add the answer of `tokens` tokens."""
        ...


class IdConversation:
    """A prompt that is one growing list of ids."""

    def __init__(self, writer: IdWriter) -> None:
        self._writer = writer
        self._parts: list[bytes] = []

    def add_turn(self, turn: Turn) -> bytes:
        self._parts.append(self._writer.json(turn.system + turn.prompt)[1:-1])
        return b"[" + b",".join(self._parts) + b"]"

    def add_answer(self, answer: ReceivedAnswer, tokens: int) -> None:
        if answer.token_ids:
            self._parts.append(",".join(map(str, answer.token_ids)).encode())
        elif tokens:
            self._parts.append(
                self._writer.json((GeneratedPiece(f"answer {tokens}", tokens),))[1:-1]
            )


class TextConversation:
    """A prompt that is one growing text."""

    def __init__(self, writer: WordWriter) -> None:
        self._writer = writer
        self._text = ""

    def add_turn(self, turn: Turn) -> bytes:
        text = self._writer.text(turn.system + turn.prompt)
        self._text = f"{self._text} {text}" if self._text else text
        return msgspec.json.encode(self._text)

    def add_answer(self, answer: ReceivedAnswer, tokens: int) -> None:
        self._text += answer.text


class ChatConversation:
    """Messages: system, user, assistant, user, … Fields of a recorded chat follow them."""

    def __init__(self, writer: WordWriter) -> None:
        self._writer = writer
        self._messages: list[dict[str, Any]] = []

    def add_turn(self, turn: Turn) -> bytes:
        if turn.chat is not None:
            more = {**turn.chat}
            self._messages = list(more.pop("messages"))
            return b"".join([msgspec.json.encode(self._messages), *map(field, more.items())])
        if turn.system:
            self._add("system", self._writer.text(turn.system))
        self._add("user", self._writer.text(turn.prompt))
        return msgspec.json.encode(self._messages)

    def add_answer(self, answer: ReceivedAnswer, tokens: int) -> None:
        self._add("assistant", answer.text)

    def _add(self, role: str, content: str) -> None:
        self._messages.append({"role": role, "content": content})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDialect:
    """Request format of one endpoint of one server; `features` are fields it accepts."""

    endpoint: str
    model: str
    writer: IdWriter | WordWriter
    features: frozenset[str] = frozenset()
    ignore_eos: bool = True
    temperature: float = 0.0

    def talk(self) -> ConversationWriter:
        """Return a new conversation."""
        if isinstance(self.writer, IdWriter):
            return IdConversation(self.writer)
        return (
            ChatConversation(self.writer)
            if self.endpoint == "chat"
            else TextConversation(self.writer)
        )

    def request(
        self, prompt: bytes, output_tokens: int, service_class: str = "", recorded: bool = False
    ) -> bytes:
        """Return the body that sends this prompt; the answer to a `recorded` chat ends by
        itself."""
        fields: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "temperature": self.temperature,
            "max_tokens": output_tokens,
        }
        for name in self.features:
            goes_on = self.ignore_eos and not recorded
            fields |= extension(name, output_tokens, service_class, goes_on)
        return body(fields, "messages" if self.endpoint == "chat" else "prompt", prompt)

    def pieces(self, turn: Turn, limit: int) -> list[int] | list[str]:
        """Return the first pieces of a turn, to find shared prefixes."""
        return self.writer.pieces(turn.system + turn.prompt, limit)


def field(named: tuple[str, Any]) -> bytes:
    """Return one more field of an object: ("n", 1) is ,"n":1."""
    name, value = named
    return b",%b:%b" % (msgspec.json.encode(name), msgspec.json.encode(value))


def extension(
    name: str, output_tokens: int, service_class: str, ignore_eos: bool
) -> dict[str, object]:
    """Return the fields of one feature, as `bench.probe` tries them."""
    if name == "stream_options":
        return {"stream_options": {"include_usage": True}}
    if name == "return_token_ids":
        return {"return_token_ids": True}
    if name == "service_class":
        return {"service_class": service_class} if service_class else {}
    if not ignore_eos:
        return {}
    return {"ignore_eos": True} if name == "ignore_eos" else {"min_tokens": output_tokens}


def turn_tokens(turn: Turn) -> int:
    """Return the tokens that a turn adds to its conversation."""
    return num_tokens(turn.system) + num_tokens(turn.prompt)
