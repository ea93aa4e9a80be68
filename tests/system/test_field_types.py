"""Each field with values of every type, and bodies that are none: refused by name, never a 5xx."""

import json
import types
import typing
from typing import Any

import aiohttp
import msgspec
import pytest
from error_cases import CHAT, STRUCTS, TEXT, changed, send

from headway.server.endpoints import GENERATIONS
from headway.server.openai.schema import NO_OPS

REFUSED = {row.path: sorted(row.body_spec.refused) for row in GENERATIONS}

SAMPLES: dict[type, list[Any]] = {
    bool: [True],
    int: [1],
    float: [0.5],
    str: ["text"],
    list: [[], [1], [None], [[[]]]],
    dict: [{}, {"a": 1}],
}


def kinds_of(hint: Any) -> set[type]:
    """The JSON types a field takes: `str | list[str] | None` → {str, list}."""
    if isinstance(hint, types.UnionType):
        return set().union(*map(kinds_of, typing.get_args(hint)))
    origin = typing.get_origin(hint) or hint
    if origin is types.NoneType:
        return set()
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return {dict}
    return {origin, int} if origin is float else {origin}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_value_of_the_wrong_type_is_refused_by_field(
    http: aiohttp.ClientSession, path: str
) -> None:
    hints = typing.get_type_hints(STRUCTS[path])
    assert len(hints) > 25
    wrong = []
    for name, hint in hints.items():
        fitting = kinds_of(hint)
        for kind, values in SAMPLES.items():
            for value in [] if kind in fitting else values:
                status, content, _ = await send(http, path, changed(path, **{name: value}))
                error = content.get("error", {})
                if (status, error.get("code"), error.get("param")) != (400, "invalid_type", name):
                    wrong.append((name, value, status, content))
    assert not wrong


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_null_stands_for_absent_in_every_field(
    http: aiohttp.ClientSession, path: str
) -> None:
    required = {"messages", "prompt"} & set(typing.get_type_hints(STRUCTS[path]))
    for name in [*typing.get_type_hints(STRUCTS[path]), *REFUSED[path], *NO_OPS]:
        status, content, headers = await send(http, path, changed(path, **{name: None}))
        assert (status == 200) == (name not in required), (name, content)
        assert "x-headway-ignored-fields" not in headers


HOSTILE = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "-0.0", "0x10", "01", "+1"),
    *("9" * 5000, "1" + "0" * 400, "18446744073709551616", "9223372036854775807", "tru", "'a'", ""),
    *('"\\ud800"', '"\\u0000"', "[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 400),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_hostile_values_in_every_field_give_no_5xx(
    http: aiohttp.ClientSession, path: str
) -> None:
    wrong = []
    for name in typing.get_type_hints(STRUCTS[path]):
        rest = json.dumps(changed(path, **{name: ...}))[1:]
        for value in HOSTILE:
            try:
                await send(http, path, f'{{"{name}":{value},{rest}'.encode())
            except AssertionError as error:
                wrong.append((name, value[:30], str(error)[:200]))
    assert not wrong


RAW: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"null", "invalid_json"),
    (b"[]", "invalid_json"),
    (b'"text"', "invalid_json"),
    (b"5", "invalid_json"),
    (b"{", "invalid_json"),
    (b"\xff\xfe", "invalid_json"),
    (b'{"model":"\xff"}', "invalid_json"),
    (b'{"model":"tiny","prompt":"\\ud800","max_tokens":1}', "invalid_json"),
    (b'{"model":"tiny","prompt":"hi","temperature":NaN}', "invalid_json"),
    (b'{"model":"tiny","prompt":"hi","temperature":1e400}', "invalid_json"),
    (b'{"a":' * 100_000, "invalid_json"),
    (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
    (b'{"model":"tiny"}{"model":"tiny"}', "invalid_json"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_a_400(
    http: aiohttp.ClientSession, path: str
) -> None:
    for raw, code in RAW:
        status, content, _ = await send(http, path, raw)
        assert (status, content["error"]["code"]) == (400, code), raw[:60]


async def test_of_a_duplicate_key_the_last_counts(http: aiohttp.ClientSession) -> None:
    raw = b'{"model":"another","model":"tiny","prompt":"hi","max_tokens":9,"max_tokens":2}'
    status, content, _ = await send(http, TEXT, raw)
    assert status == 200 and content["usage"]["completion_tokens"] == 2
