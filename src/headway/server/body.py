"""What an endpoint takes of a body: its fields, those without effect, those that are refused.

A field that changes answers and is not honoured is refused by name; an unknown one is refused under
--strict-api and else reported back.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.body import typed
from headway.server.fields import refuse


@dataclass(frozen=True, slots=True)
class Accepts:
    """What an endpoint takes: its body, names without effect, names that are refused.

    `unheeded` are fields inside others that a client must or may send, and that are not honoured:
    `thinking.budget_tokens`.
    """

    body: type[msgspec.Struct]
    no_ops: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    unheeded: tuple[str, ...] = ()

    def read(self, raw: dict[str, Any], strict: bool) -> tuple[Any, list[str]]:
        """The typed body and the names in it that are ignored; `strict` refuses unknown ones."""
        refuse(raw, self.refused)
        unknown = unknown_fields(raw, self.body, self.no_ops | self.refused)
        if unknown and strict:
            name = unknown[0][:100]
            raise RequestError(
                f"The field {name} is unknown.", param=name, code="unknown_parameter"
            )
        return typed(raw, self.body), unknown + [name for name in self.unheeded if has(raw, name)]


def unknown_fields(
    raw: dict[str, Any], kind: type[msgspec.Struct], also: frozenset[str]
) -> list[str]:
    """Names in `raw` that mean nothing to us; what is sent as null was not asked for."""
    known = set(kind.__struct_fields__) | also
    return [name for name, value in raw.items() if name not in known and value is not None]


def has(raw: dict[str, Any], path: str) -> bool:
    """Whether a field inside an object is given: `thinking.budget_tokens`, not as null."""
    outer, _, inner = path.partition(".")
    value = raw.get(outer)
    return isinstance(value, dict) and value.get(inner) is not None
