"""What may be asked of an answer's text: two fields of a body, checked before anything compiles."""

import json

import pytest

from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import MAX_TEXT_BYTES, Grammar, is_deeper
from headway.core.request import SamplingParams
from headway.server.openai.structured import asked_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def nested(depth: int) -> dict:
    """{"items": {"items": …}}, `depth` objects."""
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "structured", "kind", "text", "param"),
    [
        (None, None, None, None, None),
        ({"type": "text"}, None, None, None, None),
        ({"type": "json_object"}, None, "json_object", "", "response_format"),
        (NAMED, None, "json", SCHEMA, "response_format.json_schema.schema"),
        (None, {"json": SCHEMA}, "json", SCHEMA, "structured_outputs.json"),
        (None, {"json": json.dumps(SCHEMA)}, "json", SCHEMA, "structured_outputs.json"),
        (None, {"json_object": True}, "json_object", "", "structured_outputs.json_object"),
        (None, {"regex": "[ab]+", "json": None}, "regex", "[ab]+", "structured_outputs.regex"),
        (None, {"choice": ["a", "b"]}, "choice", ["a", "b"], "structured_outputs.choice"),
        (None, {"grammar": 'start: "x"'}, "lark", 'start: "x"', "structured_outputs.grammar"),
        ({"type": "text"}, {"regex": "a"}, "regex", "a", "structured_outputs.regex"),
    ],
)
def test_what_a_body_asks_for(response_format, structured, kind, text, param):
    found = asked_grammar(response_format, structured)
    if kind is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.param) == (kind, param)
    assert (found.text if isinstance(text, str) else json.loads(found.text)) == text


@pytest.mark.parametrize(
    ("response_format", "structured", "param", "code"),
    [
        ({}, None, "response_format.type", "missing_required_parameter"),
        ({"type": "xml"}, None, "response_format.type", "invalid_value"),
        (
            {"type": "json_schema"},
            None,
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            None,
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            None,
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}},
            None,
            "response_format.json_schema.schema",
            "invalid_type",
        ),
        (NAMED, {"regex": "a"}, "structured_outputs", "invalid_value"),
        (None, {}, "structured_outputs", "invalid_value"),
        (None, {"regex": "a", "choice": ["a"]}, "structured_outputs", "invalid_value"),
        (
            None,
            {"regex": "a", "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
            "unsupported_parameter",
        ),
        (None, {"regex": ""}, "structured_outputs.regex", "invalid_value"),
        (None, {"regex": 7}, "structured_outputs.regex", "invalid_type"),
        (None, {"choice": []}, "structured_outputs.choice", "empty_array"),
        (None, {"choice": "a"}, "structured_outputs.choice", "invalid_type"),
        (None, {"choice": ["a", 1]}, "structured_outputs.choice", "invalid_type"),
        (None, {"choice": ["a"] * 1001}, "structured_outputs.choice", "array_above_max_length"),
        (None, {"json": "{"}, "structured_outputs.json", "invalid_json"),
        (None, {"json": True}, "structured_outputs.json", "invalid_type"),
        (None, {"json": nested(65)}, "structured_outputs.json", "invalid_value"),
        (
            None,
            {"grammar": "x" * (MAX_TEXT_BYTES + 1)},
            "structured_outputs.grammar",
            "string_above_max_length",
        ),
    ],
)
def test_what_is_refused_names_its_field(response_format, structured, param, code):
    with pytest.raises(RequestError) as caught:
        asked_grammar(response_format, structured)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.status == 400


def test_depth_counts_objects_and_lists():
    assert not is_deeper({"a": [1]}, 2) and is_deeper({"a": [1]}, 1)
    assert not is_deeper(nested(64), 64) and is_deeper(nested(65), 64)
    assert grammars.json_schema(nested(64), "x").kind == "json"


def test_the_same_grammar_from_two_fields_is_compiled_once():
    one = asked_grammar(NAMED, None)
    other = asked_grammar(None, {"json": SCHEMA})
    assert one is not None and other is not None and one != other and one.key == other.key


def test_an_unknown_kind_is_an_error():
    with pytest.raises(RequestError, match="none of json, json_object"):
        Grammar(kind="gbnf", text="x")


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"allowed_token_ids": [1]}])
def test_a_grammar_alone_says_what_may_come(more):
    with pytest.raises(RequestError, match="exclude each other") as caught:
        SamplingParams(grammar=grammars.regex("a", "structured_outputs.regex"), **more)
    assert caught.value.param == next(iter(more))
