"""docs/telemetry.md names each field of `/stats`, where it is, and none that is not there.

Both are read: the tables of the page, and the structs that are answered, with and without history.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.inspect import (
    DictType,
    ListType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from headway.config.resolve import STATS_SETTINGS
from headway.core.clock import VirtualClock
from headway.telemetry.snapshot import Snapshot
from headway.telemetry.stats import take_snapshot
from telemetry_cases import answer, telemetry

PAGE = Path(__file__).resolve().parents[3] / "docs" / "telemetry.md"
TABLES = {"| field | |": "", "| field of a window | |": "windows[]."}
"""The first line of a table, and where its fields are."""

OTHER = re.compile(r"--|[?]|null$")
"""Code that is no field: options, queries, JSON's null."""


def rows() -> dict[str, str]:
    """Each field that begins a row of the two tables → the rest of the row."""
    found: dict[str, str] = {}
    for head, where in TABLES.items():
        _, _, table = PAGE.read_text(encoding="utf-8").partition(head + "\n| --- | --- |\n")
        for line in table.partition("\n\n")[0].splitlines():
            first, second = re.match(r"\| (.*?) \| (.*) \|$", line).groups()
            found |= {where + name: second for name in re.findall(r"`(.+?)`", first)}
    return found


def words(row: str) -> set[str]:
    """The names in a row: all that is written as code, `mean{duration_s, other_s}` included."""
    codes = [code for code in re.findall(r"`(.+?)`", row) if not OTHER.match(code)]
    return {word for code in codes for word in re.findall(r"\w+", code)}


ROWS = rows()


def structs(kind: Type, path: str = "") -> Iterator[tuple[str, StructType]]:
    """Each struct below a type with its path: `ClassWindow` is at `windows[].classes[]`."""
    if isinstance(kind, UnionType):
        for each in kind.types:
            yield from structs(each, path)
    elif isinstance(kind, ListType | VarTupleType):
        yield from structs(kind.item_type, path + "[]")
    elif isinstance(kind, DictType):
        yield from structs(kind.value_type, path)
    elif isinstance(kind, StructType):
        yield path, kind
        for field in kind.fields:
            below = f"{path}.{field.encode_name}" if path else field.encode_name
            yield from structs(field.type, below)


PLACES = list(structs(type_info(Snapshot)))
SETTINGS = set(STATS_SETTINGS)
KEYS = ("latency", "lengths")
"""Fields of a window whose keys are names too, as those of `settings` are."""
LABELS = ("code", "kind", "reason", "which")
"""What the keys of a count stand for: `errors{code}`."""


def row_of(path: str) -> str:
    """The row of a field, or of the nearest one above it that has any."""
    while path and path not in ROWS and f"{path}[]" not in ROWS:
        path = path.rpartition(".")[0]
    return ROWS.get(path) or ROWS.get(f"{path}[]", "")


def is_told(path: str, name: str) -> bool:
    """Whether a field has a row of its own, or is named in that of what it is in."""
    own = f"{path}.{name}" if path else name
    return own in ROWS or f"{own}[]" in ROWS or name in words(row_of(path))


@pytest.mark.parametrize("struct", sorted({s.cls for _, s in PLACES}, key=lambda c: c.__name__))
def test_each_field_is_on_the_page(struct: type) -> None:
    """What is in several places (`Percentiles`) is told in one of them at least."""
    fields = [field.encode_name for field in msgspec.structs.fields(struct)]
    missing = {
        path: [name for name in fields if not is_told(path, name)]
        for path, each in PLACES
        if each.cls is struct
    }
    assert [] in missing.values(), f"docs/telemetry.md does not tell {missing}"


@pytest.mark.parametrize("path", [path for path, struct in PLACES if struct.array_like])
def test_a_list_is_told_in_its_order(path: str) -> None:
    struct = dict(PLACES)[path]
    assert ", ".join(field.encode_name for field in struct.fields) in ROWS[path]


@pytest.mark.parametrize("with_history", [False, True])
def test_each_key_of_an_answer_is_on_the_page(with_history: bool) -> None:
    """At the top, and those that no struct has: of latencies, of lengths, of settings."""
    clock = VirtualClock(now_s=10.0)
    model = telemetry(clock)
    answer(model, clock, "a", [1.0, 0.5])
    clock.advance(1)
    found = msgspec.to_builtins(take_snapshot(model, with_history=with_history))
    assert bool(found["history"]) is with_history
    assert all(is_told("", name) for name in found)
    for name in KEYS:
        assert words(ROWS[f"windows[].{name}"]) >= found["windows"][0][name].keys()
    assert words(ROWS["settings"]) >= SETTINGS


def test_the_page_names_nothing_that_is_not_there() -> None:
    """Each first cell is a field at its place; each other name is one of some struct."""
    there = {f"{path}.{f.encode_name}".lstrip(".") for path, s in PLACES for f in s.fields}
    assert {path.removesuffix("[]") for path in ROWS} <= there
    keys = {key for name in KEYS for key in words(ROWS[f"windows[].{name}"])}
    known = {f.encode_name for _, s in PLACES for f in s.fields} | keys | SETTINGS.union(LABELS)
    for path, row in ROWS.items():
        assert words(row) <= known, f"docs/telemetry.md: the row of {path} names no field"
