"""Values that fit a schema are never found at fault, and plain misfits are named by their place."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.edge.conforms import misfit

CITY = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/name"},
        "days": {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 15},
        "units": {"enum": ["C", "F"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "minLength": 1}},
}


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ({"city": "Rome"}, None),
        ({"city": "Rome", "days": 3, "units": "C", "stops": ["a", "b"]}, None),
        ({"city": "Rome", "days": 3.0}, None),
        ({"city": "Rome", "days": None}, None),
        ([], "$"),
        ({}, "$"),
        ({"city": ""}, "$.city"),
        ({"city": 5}, "$.city"),
        ({"city": "Rome", "days": 0}, "$.days"),
        ({"city": "Rome", "days": 15}, "$.days"),
        ({"city": "Rome", "days": "3"}, "$.days"),
        ({"city": "Rome", "days": True}, "$.days"),
        ({"city": "Rome", "units": "K"}, "$.units"),
        ({"city": "Rome", "stops": ["a", 1]}, "$.stops[1]"),
        ({"city": "Rome", "stops": ["a"] * 3}, "$.stops"),
        ({"city": "Rome", "town": 1}, "$.town"),
    ],
)
def test_the_place_at_fault_is_named(value, at):
    fault = misfit(value, CITY)
    assert (fault and fault.split(": ")[0]) == at


def test_no_valid_instance_of_the_suite_is_at_fault(shared):
    """Half of the invalid ones are found, too; the rest needs keywords that are not looked at."""
    valid = found = invalid = 0
    for file in sorted((shared / "eval/json-schema-test-suite/tests/draft2020-12").glob("*.json")):
        if file.name == "vocabulary.json":  # a metaschema of its own, without these keywords
            continue
        for case in json.loads(file.read_text(encoding="utf-8")):
            for test in case["tests"]:
                fault = misfit(test["data"], case["schema"])
                if test["valid"]:
                    valid += 1
                    assert fault is None, (file.name, case["description"], test["description"])
                else:
                    invalid += 1
                    found += fault is not None
    assert valid > 700 and found > 0.4 * invalid


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [*CITY, "anyOf", "allOf", "oneOf", "const", "prefixItems", "$ref", "a"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(ANYTHING, ANYTHING)
def test_any_schema_is_borne(value, schema):
    fault = misfit(value, schema)
    assert fault is None or fault.startswith("$")


def test_a_schema_without_end_ends():
    circle = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10}}, "$ref": "#/$defs/a"}
    assert misfit(1, circle) is None


def test_a_long_value_and_a_large_schema_end_soon():
    """Both are others': a client's schema, and an answer as long as it asks for."""
    many, began_s = range(50_000), time.process_time()
    for item, schema in (
        (1, {"enum": [*range(2, 50_000), 1]}),
        (1, {"allOf": [True for _ in many]}),
        ({"a": 1}, {"required": ["a" for _ in many]}),
        ({"a": 1}, {"properties": {str(number): True for number in many}}),
    ):
        assert misfit([item] * 1000, {"items": schema}) is None
    assert time.process_time() - began_s < 3


def test_what_is_nested_too_deep_passes():
    deep, same = [], []
    for _ in range(900):
        deep, same = [deep], [same]
    assert misfit(deep, {"const": same}) is None
