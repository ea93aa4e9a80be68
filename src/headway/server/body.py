"""The fields of a body: those that an endpoint accepts, those without effect, those it refuses.

A field that would change the answer and is not honoured is refused by name. An unknown field is
refused under --strict-api, otherwise it is reported in a header.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.body import typed
from headway.server.fields import refuse_fields


@dataclass(frozen=True, slots=True)
class BodySpec:
    """The body of an endpoint, the names without effect, and the names that are refused.

    `nested_no_ops` are fields inside others that a client must or may send without effect:
    `thinking.budget_tokens`.
    """

    body: type[msgspec.Struct]
    no_ops: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    nested_no_ops: tuple[str, ...] = ()

    def read(self, raw: dict[str, Any], strict: bool) -> tuple[Any, list[str]]:
        """Return the typed body and its ignored names; `strict` refuses unknown names."""
        refuse_fields(raw, self.refused)
        unknown = unknown_fields(raw, self.body, self.no_ops | self.refused)
        if unknown and strict:
            name = unknown[0][:100]
            raise RequestError(
                f"The field {name} is unknown.", param=name, code="unknown_parameter"
            )
        return typed(raw, self.body), unknown + [
            name for name in self.nested_no_ops if has_nested_field(raw, name)
        ]


def unknown_fields(
    raw: dict[str, Any], kind: type[msgspec.Struct], no_ops: frozenset[str]
) -> list[str]:
    """Return the unknown names in `raw`; a field that is null counts as left out."""
    known = set(kind.__struct_fields__) | no_ops
    return [name for name, value in raw.items() if name not in known and value is not None]


def has_nested_field(raw: dict[str, Any], path: str) -> bool:
    """Whether a nested field is given and not null: `thinking.budget_tokens`."""
    outer, _, inner = path.partition(".")
    value = raw.get(outer)
    return isinstance(value, dict) and value.get(inner) is not None
