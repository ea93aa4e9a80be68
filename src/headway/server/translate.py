"""Another dialect's request as a chat: the one way into the engine, with the client's own words.

Responses and Messages are rewritten as the body of a chat, so that all that chat honours, checks
and refuses holds for them too. An error names the field that the client sent, not what it became.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.edge import body as bodies
from headway.server.openai.schema import ChatBody

SHARED = (
    *("seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "skip_special_tokens", "chat_template_kwargs", "slo", "service_class"),
    *("structured_outputs", "include_stop_str_in_output", "timings", "priority", "cache_salt"),
)
"""Fields that mean the same in every dialect, and have the same name."""


@dataclass(slots=True)
class Chat:
    """A chat in the making: its fields, and what the client calls them."""

    fields: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    unheeded: list[str] = field(default_factory=list)
    """The client's fields that the model is told and that no grammar keeps it to."""

    def set(self, name: str, value: Any, origin: str) -> None:
        """Set a field of the chat that the client sent as `origin`; None leaves it out."""
        self.names[name] = origin
        if value is not None:
            self.fields[name] = value

    def share(self, body: Any) -> None:
        """Take over what has the same name in both."""
        for name in SHARED:
            self.set(name, getattr(body, name), name)

    def say(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        """Add a message that came from `origin`; returns it, to be added to."""
        self.names[f"messages[{len(self.messages)}]"] = origin
        self.messages.append(message)
        return message

    def body(self) -> ChatBody:
        """The body, checked as a client's own would be; raises RequestError."""
        raw = {**self.fields, "messages": self.messages}
        with self.told():
            return bodies.typed(raw, ChatBody)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Errors raised within name the client's fields: messages[2].content → input[4].content."""
        try:
            yield
        except RequestError as error:
            self._rename(error)
            raise

    def own(self, grammar: Grammar | None) -> Grammar | None:
        """`grammar` with the client's name for its field: the engine may refuse it later."""
        if grammar is None:
            return None
        origin = self._origin(grammar.param)
        return msgspec.structs.replace(grammar, param=origin[0] if origin else grammar.param)

    def _origin(self, param: str) -> tuple[str, str, str] | None:
        """(the client's name for `param`, our name and the client's for the field around it)."""
        for name in sorted(self.names, key=len, reverse=True):
            if param == name or param.startswith((name + ".", name + "[")):
                origin = self.names[name]
                return origin + param[len(name) :], name, origin
        return None

    def _rename(self, error: RequestError) -> None:
        param = error.param or ""
        found = self._origin(param)
        if found is not None:
            error.param, name, origin = found
            old, new = (param, error.param) if param in error.cause else (name, origin)
            error.cause = error.cause.replace(old, new)
        length = self.names.get("max_completion_tokens", "max_tokens")
        error.cause = error.cause.replace("lower max_tokens", f"lower {length}")


def missing(where: str) -> RequestError:
    """A field that has to be there is not."""
    return RequestError(
        f"The field {where} is required.", param=where, code="missing_required_parameter"
    )


def text_field(item: dict[str, Any], name: str, where: str) -> str:
    """A field that must be a string; RequestError names it."""
    value = item.get(name)
    if value is None:
        raise missing(f"{where}.{name}")
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} must be a string.", param=f"{where}.{name}", code="invalid_type"
        )
    return value


def unsupported(where: str, what: str, fix: str) -> RequestError:
    """Something that is known and not honoured, by name."""
    return RequestError(f"{where} is {what}; {fix}.", param=where, code="unsupported_value")
