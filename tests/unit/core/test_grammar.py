"""What may be asked of an answer's text: fields of a body, checked before anything compiles."""

import json
from types import SimpleNamespace

import pytest

from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import MAX_TEXT_BYTES, Grammar, is_deeper
from headway.core.request import SamplingParams
from headway.server.openai.structured import body_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def asked(**fields):
    """The grammar of a body with these fields."""
    return body_grammar(SimpleNamespace(**fields))


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
    found = asked(response_format=response_format, structured_outputs=structured)
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
        asked(response_format=response_format, structured_outputs=structured)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.status == 400


GBNF, LARK = 'root ::= "yes" | "no"', 'start: "yes" | "no"'


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("guided_json", SCHEMA, "json", SCHEMA),
        ("guided_json", json.dumps(SCHEMA), "json", SCHEMA),
        ("guided_regex", "[ab]+", "regex", "[ab]+"),
        ("guided_choice", ["a", "b"], "choice", ["a", "b"]),
        ("guided_grammar", GBNF, "gbnf", GBNF),
        ("guided_grammar", LARK, "lark", LARK),
        ("json_schema", SCHEMA, "json", SCHEMA),
        ("json_schema", json.dumps(SCHEMA), "json", SCHEMA),
        ("grammar", GBNF, "gbnf", GBNF),
        ("regex", "[ab]+", "regex", "[ab]+"),
        ("ebnf", GBNF, "gbnf", GBNF),
        ("format", "json", "json_object", ""),
        ("format", SCHEMA, "json", SCHEMA),
    ],
)
def test_other_servers_names_are_honoured(name, value, kind, text):
    found = asked(**{name: value})
    assert (found.kind, found.param) == (kind, name)
    assert (found.text if isinstance(text, str) else json.loads(found.text)) == text
    with pytest.raises(RequestError, match="exclude each other") as caught:
        asked(response_format=NAMED, **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["json_schema", "grammar", "regex", "ebnf", "format"])
def test_an_empty_text_asks_for_nothing_where_clients_send_it_by_default(name):
    assert asked(**{name: ""}) is None


def test_a_schema_may_stand_beside_the_type():
    for kind in ("json_object", "json_schema"):
        found = asked(response_format={"type": kind, "schema": SCHEMA})
        assert (found.kind, json.loads(found.text)) == ("json", SCHEMA)
        assert found.param == "response_format.schema"


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "text", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema"),
        ({**NAMED, "schema": SCHEMA}, "response_format.schema"),
        ({**NAMED, "regex": "a"}, "response_format.regex"),
        (
            {"type": "json_schema", "json_schema": {**NAMED["json_schema"], "pattern": "a"}},
            "response_format.json_schema.pattern",
        ),
        ({"type": "structural_tag", "format": {}}, "response_format.type"),
    ],
)
def test_a_key_that_would_be_dropped_is_refused(response_format, param):
    with pytest.raises(RequestError) as caught:
        asked(response_format=response_format)
    assert caught.value.param == param


def test_flags_that_ask_for_nothing_may_stand_beside_a_constraint():
    """vLLM's own client writes out the defaults of its StructuredOutputsParams."""
    found = asked(structured_outputs={"regex": "a", "disable_fallback": False, "json": None})
    assert found.kind == "regex"


def test_depth_counts_objects_and_lists():
    assert not is_deeper({"a": [1]}, 2) and is_deeper({"a": [1]}, 1)
    assert not is_deeper(nested(64), 64) and is_deeper(nested(65), 64)
    assert grammars.json_schema(nested(64), "x").kind == "json"


def test_exclusive_whole_bounds_are_moved_apart():
    """In schemas alone: not in data, nor in properties of that name, nor for integers."""
    bound = {"exclusiveMinimum": 2, "maximum": 2.5}
    moved = {"exclusiveMinimum": 2.000000001, "maximum": 2.5}
    below = {"type": "number", "exclusiveMaximum": -2.0}
    for schema, expected in (
        (bound, moved),
        (below, {**below, "exclusiveMaximum": -2.000000001}),
        ({"anyOf": [bound], "items": bound}, {"anyOf": [moved], "items": moved}),
        ({"properties": {"enum": bound}}, {"properties": {"enum": moved}}),
        ({"exclusiveMinimum": 10**7}, {"exclusiveMinimum": 10_000_000.001}),
    ):
        assert json.loads(grammars.json_schema(schema, "schema").text) == expected
    for schema in (
        *({"type": "integer", **bound}, {"const": bound}, {"enum": [bound]}, {"default": bound}),
        *({"properties": {"exclusiveMinimum": {"type": "string"}}}, {"exclusiveMinimum": 0.5}),
        *({"exclusiveMinimum": True}, {"exclusiveMaximum": 10**300}, {"minimum": 2}),
    ):
        assert json.loads(grammars.json_schema(schema, "schema").text) == schema


def test_the_same_grammar_from_two_fields_is_compiled_once():
    one = asked(response_format=NAMED)
    other = asked(structured_outputs={"json": SCHEMA})
    assert one is not None and other is not None and one != other and one.key == other.key


def test_an_unknown_kind_is_an_error():
    with pytest.raises(RequestError, match="none of json, json_object"):
        Grammar(kind="bnf", text="x")


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"allowed_token_ids": [1]}])
def test_a_grammar_alone_says_what_may_come(more):
    with pytest.raises(RequestError, match="exclude each other") as caught:
        SamplingParams(grammar=grammars.regex("a", "structured_outputs.regex"), **more)
    assert caught.value.param == next(iter(more))
