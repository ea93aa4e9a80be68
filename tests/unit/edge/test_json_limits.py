"""Bodies of too many values: counted without making them, refused by the field that holds them."""

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.edge import json_limits
from headway.edge.body import SMALL_BYTES, read_pieces
from headway.edge.json_limits import MAX_IDS, MAX_VALUES, check_counts, num_values
from headway.server.openai.schema import ChatBody, CompletionBody
from headway.server.tokenizer_pool import TokenizerPool
from headway.server.tokens import DetokenizeBody

TEXTS = st.text(alphabet='a,"\\[]{}\né🌊', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def marks(value: Any) -> int:
    """Commas and opening brackets that `value` has as JSON, outside its strings."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(map(marks, inner))


@given(value=VALUES, size=st.sampled_from([1, 2, 3, 7, 64]), ascii_only=st.booleans())
def test_values_are_counted_as_they_are(value: Any, size: int, ascii_only: bool) -> None:
    data = bytearray(json.dumps(value, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "SLICE_BYTES", size)
        assert num_values(data, 10**9) == marks(value)


def of(**fields: Any) -> bytearray:
    return bytearray(msgspec.json.encode({"model": "m", **fields}))


MANY = MAX_VALUES + 1
BOMBS: dict[str, tuple[type[msgspec.Struct], bytearray, str | None]] = {
    "a schema of lists": (ChatBody, of(response_format={"schema": [[]] * MANY}), "response_format"),
    "biases": (
        ChatBody,
        of(messages=[], logit_bias={str(i): 1 for i in range(MANY)}),
        "logit_bias",
    ),
    "tools": (ChatBody, of(tools=[{"type": "function"}] * MANY, messages=[]), "tools"),
    "messages": (ChatBody, of(messages=[{"role": "user", "content": ""}] * MANY), "messages"),
    "unknown fields": (ChatBody, of(**{f"x{i}": i for i in range(MANY)}), None),
    "an unknown field": (ChatBody, of(x=[{}] * MANY), None),
    "ids to detokenize": (DetokenizeBody, of(tokens=[1] * (MAX_IDS + 1)), "tokens"),
    "ids as a prompt": (CompletionBody, of(prompt=[1] * (MAX_IDS + 1)), "prompt"),
    "lists in place of numbers": (CompletionBody, of(prompt=[[]] * MANY), "prompt"),
    "texts in place of numbers": (
        CompletionBody,
        of(stop_token_ids=["1"] * MANY),
        "stop_token_ids",
    ),
    "lists in two fields": (
        CompletionBody,
        of(prompt=[[]] * (MANY // 4), allowed_token_ids=[{}] * (MANY * 3 // 4 + 1)),
        "allowed_token_ids",
    ),
    "two large fields": (
        ChatBody,
        of(messages=[{}] * (MAX_VALUES // 4), tools=[{}] * (MAX_VALUES * 3 // 4)),
        "tools",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_too_many_values_are_refused_by_the_field_that_holds_them(name: str) -> None:
    kind, data, field = BOMBS[name]
    with pytest.raises(RequestError) as caught:
        check_counts(data, kind)
    assert (caught.value.param, caught.value.code) == (field, "too_many_values")
    assert f"{MAX_IDS if name.startswith('ids') else MAX_VALUES:,}" in caught.value.cause


GOOD: dict[str, tuple[type[msgspec.Struct], bytearray]] = {
    "a text full of commas": (CompletionBody, of(prompt='",[{\\' * 100_000)),
    "ids": (CompletionBody, of(prompt=[[1] * 9000] * 100)),
    "ids and as many biases as fit": (
        CompletionBody,
        of(prompt=[1] * 500_000, logit_bias={str(i): 1 for i in range(MAX_VALUES - 100)}),
    ),
    "many prompts": (CompletionBody, of(prompt=["a, b"] * 50_000)),
    "a long conversation": (
        ChatBody,
        of(messages=[{"role": "user", "content": "a, b"}] * (MAX_VALUES // 4)),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_merely_long_passes(name: str) -> None:
    kind, data = GOOD[name]
    check_counts(data, kind)


@pytest.mark.parametrize(
    "data",
    [
        b"[[]," * MANY,
        b'{"a":' + b"[" * MANY,
        b'{"a":[' + b"[]," * MANY + b"x]}",
        b"[1" + b",1" * MANY,
    ],
    ids=["lists", "depth", "the end", "a list"],
)
def test_what_is_no_object_is_refused_before_its_values_are_made(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        check_counts(data, ChatBody)
    assert caught.value.code == "invalid_json"


def test_a_count_stops_where_it_is_decided() -> None:
    source = random.Random(3)
    data = bytearray(json.dumps([source.random() for _ in range(300_000)]).encode())
    assert 100 < num_values(data, 100) < 10_000


async def test_a_body_in_tiny_pieces_takes_no_more_than_its_bytes() -> None:
    rest = [b"[", *[b"1,"] * 50_000, b"1]", b"", bytes(SMALL_BYTES), b"\n"]
    whole = b"".join(rest)

    async def receive() -> dict[str, Any]:
        data = rest.pop(0)
        return {"type": "http.request", "body": data, "more_body": bool(rest)}

    pieces = await read_pieces(receive, len(whole), TokenizerPool().turns, "")
    assert len(pieces) == 3
    assert b"".join(pieces) == whole
