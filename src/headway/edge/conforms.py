"""Approximate check of a JSON value against a JSON Schema, for counting, not for enforcing.

`misfit` names the first place of a value that violates a schema. It has no false positives: what it
does not know (`pattern`, `format`, remote `$ref`, `unevaluated…`) counts as valid. It ends on any
schema, because it checks a bounded number of places.
"""

from collections.abc import Callable, Iterator
from typing import Any

MAX_CHECKS = 20_000
MAX_DEPTH = 100

Schema = Any
Check = Callable[["Fitting", Any, Any, dict[str, Any], str, int], Iterator[str]]


def misfit(value: Any, schema: Schema) -> str | None:
    """Return where and why `value` is invalid: "$.days: 'two' is no integer"; None if valid."""
    try:
        return next(Fitting(schema).faults(value, schema, "$", 0), None)
    except (EnoughError, RecursionError):
        return None


class EnoughError(Exception):
    """The maximum number of places was checked."""


class Fitting:
    """One comparison: the root of `$ref`, and the number of checked places."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.num_checks = 0

    def faults(self, value: Any, schema: Schema, at: str, depth: int) -> Iterator[str]:
        """Yield each violation."""
        self.look(1)
        if depth > MAX_DEPTH:
            return
        if schema is False:
            yield f"{at}: nothing may stand here"
        if not isinstance(schema, dict):
            return
        for keyword, check in CHECKS.items():
            if keyword in schema:
                yield from check(self, value, schema[keyword], schema, at, depth + 1)

    def look(self, places: int) -> None:
        """Count checked places; raises EnoughError beyond the maximum."""
        self.num_checks += places
        if self.num_checks > MAX_CHECKS:
            raise EnoughError

    def fits(self, value: Any, schema: Schema, depth: int) -> bool:
        """Return whether the value has no violation."""
        return next(self.faults(value, schema, "", depth), None) is None


# ── values ──────────────────────────────────────────────────────────────────────────────────────


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and value == value // 1,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def format_value(value: Any) -> str:
    """Format a value for a message."""
    return repr(value)[:60]


# ── keywords ────────────────────────────────────────────────────────────────────────────────────


def check_type(
    fitting: Fitting, value: Any, kinds: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    names = kinds if isinstance(kinds, list) else [kinds]
    known = [TYPES[name] for name in names if isinstance(name, str) and name in TYPES]
    if len(known) == len(names) and not any(is_kind(value) for is_kind in known):
        yield f"{at}: {format_value(value)} is no {' or '.join(names)}"


def check_enum(
    fitting: Fitting, value: Any, choices: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    choices = choices if isinstance(choices, list) else [value]
    fitting.look(len(choices))
    if not any(json_equal(value, choice) for choice in choices):
        yield f"{at}: {format_value(value)} is none of the choices"


def check_const(
    fitting: Fitting, value: Any, only: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if not json_equal(value, only):
        yield f"{at}: {format_value(value)} is not {format_value(only)}"


def check_required(
    fitting: Fitting, value: Any, names: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(names, list):
        fitting.look(len(names))
        for name in names:
            if isinstance(name, str) and name not in value:
                yield f"{at}: {name[:60]} is missing"


def check_properties(
    fitting: Fitting, value: Any, known: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(known, dict):
        fitting.look(len(known))
        for name, inner in known.items():
            if name in value:
                yield from fitting.faults(value[name], inner, f"{at}.{name}", depth)


def check_additional(
    fitting: Fitting, value: Any, inner: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(value, dict) and not schema.get("patternProperties"):
        known = schema.get("properties")
        for name in value:
            if not (isinstance(known, dict) and name in known):
                yield from fitting.faults(value[name], inner, f"{at}.{name}", depth)


def check_items(
    fitting: Fitting, value: Any, inner: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(value, list) and not isinstance(inner, list):
        first = schema.get("prefixItems")
        begin = len(first) if isinstance(first, list) else 0
        for number, item in enumerate(value[begin:], begin):
            yield from fitting.faults(item, inner, f"{at}[{number}]", depth)


def check_prefix(
    fitting: Fitting, value: Any, inner: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(value, list) and isinstance(inner, list):
        for number, (item, one) in enumerate(zip(value, inner, strict=False)):
            yield from fitting.faults(item, one, f"{at}[{number}]", depth)


def check_all(
    fitting: Fitting, value: Any, parts: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    if isinstance(parts, list):
        for part in parts:
            yield from fitting.faults(value, part, at, depth)


def check_any(
    fitting: Fitting, value: Any, parts: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    alternatives = parts if isinstance(parts, list) else []
    if alternatives and not any(fitting.fits(value, part, depth) for part in alternatives):
        yield f"{at}: {format_value(value)} is none of the alternatives"


def check_ref(
    fitting: Fitting, value: Any, reference: Any, schema: dict[str, Any], at: str, depth: int
) -> Iterator[str]:
    """Follow a plain path from the root, such as "#/$defs/city"; other references are valid."""
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return
    place = fitting.root
    for step in reference[2:].split("/"):
        if not isinstance(place, dict) or "$id" in place or step not in place:
            return
        place = place[step]
    yield from fitting.faults(value, place, at, depth)


def bound_check(
    measure: Callable[[Any], float | None], holds: Callable[[Any, Any], bool], words: str
) -> Check:
    """Return the check of a keyword that bounds a measure of the value."""

    def check(
        fitting: Fitting, value: Any, limit: Any, schema: dict[str, Any], at: str, depth: int
    ) -> Iterator[str]:
        size = measure(value)
        if size is not None and is_number(limit) and not holds(size, limit):
            yield f"{at}: {format_value(value)} is {words} {format_value(limit)}"

    return check


def number(value: Any) -> float | None:
    return value if is_number(value) else None


def length(kind: type[str | list[Any] | dict[str, Any]]) -> Callable[[Any], float | None]:
    return lambda value: len(value) if isinstance(value, kind) else None


def at_least(size: Any, limit: Any) -> bool:
    return bool(size >= limit)


def at_most(size: Any, limit: Any) -> bool:
    return bool(size <= limit)


CHECKS: dict[str, Check] = {
    "type": check_type,
    "enum": check_enum,
    "const": check_const,
    "required": check_required,
    "properties": check_properties,
    "additionalProperties": check_additional,
    "prefixItems": check_prefix,
    "items": check_items,
    "allOf": check_all,
    "anyOf": check_any,
    "oneOf": check_any,
    "$ref": check_ref,
    "minimum": bound_check(number, at_least, "less than"),
    "maximum": bound_check(number, at_most, "more than"),
    "exclusiveMinimum": bound_check(
        number, lambda size, limit: bool(size > limit), "not more than"
    ),
    "exclusiveMaximum": bound_check(
        number, lambda size, limit: bool(size < limit), "not less than"
    ),
    "minLength": bound_check(length(str), at_least, "shorter than"),
    "maxLength": bound_check(length(str), at_most, "longer than"),
    "minItems": bound_check(length(list), at_least, "shorter than"),
    "maxItems": bound_check(length(list), at_most, "longer than"),
    "minProperties": bound_check(length(dict), at_least, "smaller than"),
    "maxProperties": bound_check(length(dict), at_most, "larger than"),
}
