"""One option: name, type, unit, default, bounds and help, stated once on a dataclass field.

`option(...)` makes the field; `parse_value` turns the text of a flag, an environment variable or a
YAML value into the field's type. Integers may end in k, m, g (1000s) or K, M, G (1024s): 32k is
32,000 and 32K is 32,768, as in vLLM; bytes also read 4GiB, 500MB and a share such as 40%, times
read 0.05, 50ms and 2m.
"""

import dataclasses
import re
import types
import typing
from typing import Any

from headway.core.errors import UsageError

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
BYTE_SUFFIXES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
TIME_SUFFIXES = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class Bytes(int):
    """A number of bytes, or a share of the free memory when negative: -40 is 40%."""

    @property
    def share(self) -> float | None:
        """0.4 for 40%, None for an absolute number."""
        return -self / 100 if self < 0 else None


class Seconds(float):
    """A duration in seconds; text may bring a unit: 50ms, 1.5s, 2m."""


class Multiple(float):
    """Factor on an option's present value, among its `tunable` values: Multiple(2) of 32 is 64."""


class Stages(int):
    """Ranks that are stages of a pipeline; `halves`, which is -2: two halves of every layer."""

    @property
    def are_halves(self) -> bool:
        return self < 0

    def __str__(self) -> str:
        return "halves" if self.are_halves else str(int(self))


def plain(number: object) -> float | int:
    """Of a number with a unit, such as `Seconds`, the number: msgspec encodes no other."""
    if isinstance(number, float):
        return float(number)
    assert isinstance(number, int), f"{type(number)} is encoded"
    return int(number)


HALVES = Stages(-2)
MOST_STAGES = 64


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    common: bool = False,
    secret: bool = False,
    separator: str = ",",
    tunable: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field that is an option; `common` ones are on the first page of the help.

    A list is one value several times, or several with `separator` between them ("" for none).
    `tunable` are the values, or multiples of the present one, that are worth a trial.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "unit": unit,
        "common": common,
        "secret": secret,
        "separator": separator,
        "tunable": tunable,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """max_model_len → --max-model-len."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """max_model_len → HEADWAY_MAX_MODEL_LEN."""
    return "HEADWAY_" + name.upper()


def value_type(cls: type, name: str) -> tuple[type, bool]:
    """The field's plain type and whether it is a list: `list[str]` → (str, True)."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


REMOVED_VALUES = {
    ("suite", "examples"): "headway doctor --data FILE counts the examples of recorded chats.",
}
"""(Option, removed value) → what to do instead."""


def parse_value(cls: type, field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """`value` (text, or a YAML scalar or list) as the field's type; UsageError names `source`."""
    kind, many = value_type(cls, field.name)
    if many:
        items = value if isinstance(value, list) else split(str(value), field.metadata["separator"])
        return [parse_one(kind, field, item, source) for item in items]
    return parse_one(kind, field, value, source)


def split(text: str, separator: str) -> list[str]:
    """Items between separators: "a,b" → ["a", "b"]; what is empty is nothing: "" → []."""
    return [item for item in (text.split(separator) if separator else [text]) if item]


def parse_one(kind: type, field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """One value of type `kind`, within the field's choices and bounds."""
    rules = field.metadata
    try:
        parsed = PARSERS[kind](value)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{source}: {value!r} is not {KIND_NAMES[kind]}.",
            f"{flag_name(field.name)}: {rules['help']}",
        ) from None
    if (field.name, parsed) in REMOVED_VALUES:
        raise UsageError(f"{source}: {parsed} is gone.", REMOVED_VALUES[field.name, parsed])
    if rules["choices"] and parsed not in rules["choices"]:
        raise UsageError(
            f"{source}: {value!r} is not one of {', '.join(rules['choices'])}.",
            f"{flag_name(field.name)}: {rules['help']}",
        )
    low, high = rules["low"], rules["high"]
    if kind in (int, float, Bytes, Seconds) and (
        (low is not None and parsed < low) or (high is not None and parsed > high)
    ):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(
            f"{source}: {value} is out of range.", f"{flag_name(field.name)} must be {bounds}."
        )
    return parsed


def parse_int(value: Any) -> int:
    """8192, "8192", "8k" (8,000) or "8K" (8,192)."""
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?)([kmgKMG]?)", str(value).strip())
    if not match or ("." in match[1] and not match[2]):
        raise ValueError(value)
    return int(float(match[1]) * SUFFIXES[match[2]]) if match[2] else int(match[1])


def parse_float(value: Any) -> float:
    """A finite decimal."""
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(value)
    return number


def parse_bool(value: Any) -> bool:
    """true, yes, on, 1 and their opposites."""
    text = str(value).strip().lower()
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise ValueError(value)


def parse_bytes(value: Any) -> Bytes:
    """4GiB, 500MB, 1073741824, or 40% (a share, kept as -40)."""
    text = str(value).strip()
    if text.endswith("%"):
        share = int(text[:-1])
        if not 0 < share <= 100:
            raise ValueError(value)
        return Bytes(-share)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].lower() not in BYTE_SUFFIXES:
        raise ValueError(value)
    return Bytes(float(match[1]) * BYTE_SUFFIXES[match[2].lower()])


def parse_seconds(value: Any) -> Seconds:
    """0.05, 50ms, 1.5s or 2m."""
    match = re.fullmatch(r"(.*?)([a-z]*)", str(value).strip())
    if isinstance(value, bool) or not match or match[2] not in TIME_SUFFIXES:
        raise ValueError(value)
    return Seconds(parse_float(match[1]) * TIME_SUFFIXES[match[2]])


def parse_stages(value: Any) -> Stages:
    """1 to 64, or halves."""
    if str(value).strip() == str(HALVES):
        return HALVES
    number = parse_int(value)
    if not 1 <= number <= MOST_STAGES:
        raise ValueError(value)
    return Stages(number)


def parse_text(value: Any) -> str:
    """Any text."""
    return str(value)


PARSERS: dict[type, Any] = {
    int: parse_int,
    float: parse_float,
    bool: parse_bool,
    str: parse_text,
    Bytes: parse_bytes,
    Seconds: parse_seconds,
    Stages: parse_stages,
}
KIND_NAMES = {
    int: "an integer (32k and 32K are fine)",
    float: "a number",
    bool: "true or false",
    str: "text",
    Bytes: "a number of bytes (4GiB, 500MB or 40%)",
    Seconds: "a time (0.05, 50ms or 2m)",
    Stages: f"a number from 1 to {MOST_STAGES}, or halves",
}
