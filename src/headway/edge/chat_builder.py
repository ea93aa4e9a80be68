"""A request of another dialect as a chat, with errors in the client's own field names.

Bodies of Responses and Messages are rewritten as that of a chat, so that all that chat honours,
checks and refuses holds for them too. An error names the field that the client sent.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.edge import body as bodies

Kind = TypeVar("Kind", bound=msgspec.Struct)
SHARED_FIELDS = (
    *("seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "skip_special_tokens", "chat_template_kwargs", "slo", "service_class"),
    *("structured_outputs", "include_stop_str_in_output", "timings", "priority", "cache_salt"),
)
"""Fields with the same name and meaning in every dialect."""


@dataclass(slots=True)
class ChatBuilder:
    """Builder of a chat body, with the client's name of each field."""

    fields: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    unenforced: list[str] = field(default_factory=list)
    """The client's fields that are shown to the model and that no grammar enforces."""
    takes_images: bool = False
    """Whether the chat may have images; else they are refused."""

    def set(self, name: str, value: Any, origin: str) -> None:
        """Set a field of the chat that the client sent as `origin`; None leaves it out."""
        self.names[name] = origin
        if value is not None:
            self.fields[name] = value

    def copy_shared_fields(self, body: Any) -> None:
        """Copy the fields that have the same name in both dialects."""
        for name in SHARED_FIELDS:
            self.set(name, getattr(body, name), name)

    def add_message(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        """Append a message that the client sent as `origin`, and return it."""
        self.names[f"messages[{len(self.messages)}]"] = origin
        self.messages.append(message)
        return message

    def body(self, kind: type[Kind]) -> Kind:
        """Return the chat body, checked like that of a client; raises RequestError."""
        with self.client_names():
            return bodies.typed(self.raw(), kind)

    def raw(self) -> dict[str, Any]:
        """Return the chat body as JSON has it."""
        return {**self.fields, "messages": self.messages}

    @contextlib.contextmanager
    def client_names(self) -> Iterator[None]:
        """Let errors name the client's fields: messages[2].content → input[4].content."""
        try:
            yield
        except RequestError as error:
            self._rename(error)
            raise

    def with_client_name(self, grammar: Grammar | None) -> Grammar | None:
        """Return `grammar` with the client's name of its field, for a later error of the engine."""
        if grammar is None:
            return None
        origin = self._origin(grammar.param)
        return msgspec.structs.replace(grammar, param=origin[0] if origin else grammar.param)

    def _origin(self, param: str) -> tuple[str, str, str] | None:
        """Return (client's name of `param`, name in the chat and client's name of the field)."""
        for name in sorted(self.names, key=len, reverse=True):
            if param == name or param.startswith((name + ".", name + "[")):
                origin = self.names[name]
                return origin + param[len(name) :], name, origin
        return None

    def _rename(self, error: RequestError) -> None:
        param = error.param or ""
        match = self._origin(param)
        if match is not None:
            error.param, name, origin = match
            old, new = (param, error.param) if param in error.cause else (name, origin)
            error.cause = error.cause.replace(old, new)
        length = self.names.get("max_completion_tokens", "max_tokens")
        error.cause = error.cause.replace("lower max_tokens", f"lower {length}")


def missing_field(where: str) -> RequestError:
    """Return the error of a required field that is missing."""
    return RequestError(
        f"The field {where} is required.", param=where, code="missing_required_parameter"
    )


def text_field(item: dict[str, Any], name: str, where: str) -> str:
    """Return a field that must be a string; RequestError names it."""
    value = item.get(name)
    if value is None:
        raise missing_field(f"{where}.{name}")
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} must be a string.", param=f"{where}.{name}", code="invalid_type"
        )
    return value


def unsupported_value(where: str, fault: str, fix: str) -> RequestError:
    """Return the error of a known value that is not supported."""
    return RequestError(f"{where} is {fault}; {fix}.", param=where, code="unsupported_value")
