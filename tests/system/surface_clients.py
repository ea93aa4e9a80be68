"""Asking the four endpoints through the official clients: whole or streamed, one `Got` for all."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

EOS = 2
LENGTH = 32
CHAT, TEXT, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
ENDPOINTS = (CHAT, TEXT, RESPONSES, MESSAGES)


@dataclass
class Got:
    """An answer, whichever endpoint it came from and however it came."""

    texts: list[str]
    finish: list[str | None]
    num_prompt: int = 0
    num_answer: int = 0
    logprobs: list[Any] = field(default_factory=list)
    raw: Any = None
    """The whole object, or the last chunk or event that has one."""
    chunks: list[Any] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        """Whether it came from /v1/chat/completions."""
        return "chat" in getattr(self.raw, "object", "")

    def extra(self, name: str) -> Any:
        """What is in the answer beside what the client knows."""
        return (self.raw.model_extra or {}).get(name)


Ask = Callable[..., Got]


@dataclass
class Clients:
    """The official clients on one server."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def ask(self, endpoint: str, streamed: bool) -> Ask:
        """Asks `endpoint` with the usual fields and some more; `...` leaves one out."""
        whole, stream, base = ADAPTERS[endpoint]
        cached: list[Got] = []

        def ask(**fields: Any) -> Got:
            if not fields and cached:
                return cached[0]
            asked = {k: v for k, v in {**base, **fields}.items() if v is not ...}
            got = stream(self, asked) if streamed else whole(self, asked)
            if not fields:
                cached.append(got)
            return got

        return ask


def call(create: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """`create` with the fields it knows as arguments, the others in the body."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    return create(**{k: v for k, v in fields.items() if k in known}, extra_body=extra)


def whole_choices(clients: Clients, fields: dict[str, Any]) -> Got:
    """Chat or completions."""
    raw = call(creator(clients, fields), fields)
    texts = [c.message.content if "messages" in fields else c.text for c in raw.choices]
    return Got(
        texts=texts,
        finish=[c.finish_reason for c in raw.choices],
        num_prompt=raw.usage.prompt_tokens,
        num_answer=raw.usage.completion_tokens,
        logprobs=[entry for c in raw.choices for entry in entries(c)],
        raw=raw,
    )


def creator(clients: Clients, fields: dict[str, Any]) -> Callable[..., Any]:
    if "messages" in fields:
        return clients.openai.chat.completions.create
    return clients.openai.completions.create


def entries(choice: Any) -> list[Any]:
    """The log-probabilities of a choice, one for each token."""
    if choice.logprobs is None:
        return []
    return getattr(choice.logprobs, "content", None) or choice.logprobs.token_logprobs


def streamed_choices(clients: Clients, fields: dict[str, Any]) -> Got:
    fields = {"stream_options": {"include_usage": True}, **fields, "stream": True}
    chunks = list(call(creator(clients, fields), fields))
    got = Got(texts=[], finish=[], raw=chunks[-1], chunks=chunks)
    for chunk in chunks:
        if chunk.usage:
            got.num_prompt, got.num_answer = (
                chunk.usage.prompt_tokens,
                chunk.usage.completion_tokens,
            )
        for choice in chunk.choices:
            while len(got.texts) <= choice.index:
                got.texts.append("")
                got.finish.append(None)
            text = choice.delta.content if "messages" in fields else choice.text
            got.texts[choice.index] += text or ""
            got.finish[choice.index] = choice.finish_reason or got.finish[choice.index]
            got.logprobs += entries(choice)
    return got


def whole_response(clients: Clients, fields: dict[str, Any]) -> Got:
    return response_got(call(clients.openai.responses.create, fields))


def response_got(raw: Any) -> Got:
    details = raw.incomplete_details
    parts = [p for item in raw.output if item.type == "message" for p in item.content]
    return Got(
        texts=[raw.output_text],
        finish=["length" if details and details.reason == "max_output_tokens" else "stop"],
        num_prompt=raw.usage.input_tokens,
        num_answer=raw.usage.output_tokens,
        logprobs=[entry for part in parts for entry in part.logprobs or []],
        raw=raw,
    )


def streamed_response(clients: Clients, fields: dict[str, Any]) -> Got:
    events = list(call(clients.openai.responses.create, {**fields, "stream": True}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    got = response_got(events[-1].response)
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == got.texts[0]
    got.chunks = events
    return got


FINISHES = {"max_tokens": "length", "model_context_window_exceeded": "length"}


def whole_message(clients: Clients, fields: dict[str, Any]) -> Got:
    return message_got(call(clients.anthropic.messages.create, fields))


def prompt_tokens(usage: Any) -> int:
    """All tokens of the prompt: this dialect counts those that were cached apart."""
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0))


def message_got(raw: Any) -> Got:
    return Got(
        texts=["".join(block.text for block in raw.content if block.type == "text")],
        finish=[FINISHES.get(raw.stop_reason, "stop")],
        num_prompt=prompt_tokens(raw.usage),
        num_answer=raw.usage.output_tokens,
        raw=raw,
    )


def streamed_message(clients: Clients, fields: dict[str, Any]) -> Got:
    events = list(call(clients.anthropic.messages.create, {**fields, "stream": True}))
    started, told = events[0].message, events[-2]
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    return Got(
        texts=[text],
        finish=[FINISHES.get(told.delta.stop_reason, "stop")],
        num_prompt=prompt_tokens(started.usage),
        num_answer=told.usage.output_tokens,
        raw=told if told.model_extra else started,
        chunks=events,
    )


USER: Any = [{"role": "user", "content": "Tell me about the sea."}]
ADAPTERS: dict[str, tuple[Callable[..., Got], Callable[..., Got], dict[str, Any]]] = {
    CHAT: (
        whole_choices,
        streamed_choices,
        {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": LENGTH},
    ),
    TEXT: (
        whole_choices,
        streamed_choices,
        {"model": "tiny", "prompt": "Once upon", "temperature": 0, "max_tokens": LENGTH},
    ),
    RESPONSES: (
        whole_response,
        streamed_response,
        {
            "model": "tiny",
            "input": "Tell me about the sea.",
            "temperature": 0,
            "max_output_tokens": LENGTH,
        },
    ),
    MESSAGES: (
        whole_message,
        streamed_message,
        {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": LENGTH},
    ),
}
