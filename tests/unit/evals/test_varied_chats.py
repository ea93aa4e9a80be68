"""Chats as frameworks write them: what is right stands in them, and no test's question does."""

import json
import random
from itertools import islice

import pytest

from headway.evals.skills.dressing import Field, draw_style, function
from headway.evals.skills.example import TOOL_CLOSE, TOOL_OPEN, Example
from headway.evals.skills.structured import POSTAMBLE, PREAMBLE
from headway.evals.skills.varied import FIRST, VARIED, held_out, varied_examples

SENT = (
    {
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "type": "object",
    },
    {
        "properties": {"city": {"title": "City", "type": "string"}},
        "required": ["city"],
        "type": "object",
        "additionalProperties": False,
    },
    {
        "properties": {"city": {"title": "City", "type": "string"}},
        "required": ["city"],
        "title": "get_weather_args",
        "type": "object",
        "additionalProperties": False,
    },
    {
        "additionalProperties": False,
        "properties": {"city": {"description": "The name of the city.", "type": "string"}},
        "required": ["city"],
        "type": "object",
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city."}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
"""One tool's parameters from LangChain, LlamaIndex, openai-agents, pydantic-ai and the AI SDK."""


def test_every_framework_has_its_dress() -> None:
    """Letter by letter: with the order of its keys, and what it adds."""
    city = Field(name="city", value="Oslo", description="The name of the city.")
    rng = random.Random(0)
    drawn = {json.dumps(draw_style(rng, "get_weather", "").schema([city])) for _ in range(20_000)}
    assert [sent for sent in SENT if json.dumps(sent) not in drawn] == []


def test_a_dress_changes_nothing_of_what_is_right() -> None:
    rng = random.Random(1)
    fields = [
        Field(name="city", value="Oslo", description="The city"),
        Field(name="days", value=3, kind="integer"),
        Field(name="unit", value="c", default="c", choices=("c", "f")),
    ]
    for _ in range(300):
        described = function(rng, "forecast", "Tell the weather.", fields)["function"]
        assert isinstance(described, dict)
        schema = described["parameters"]
        assert {name: one["type"] for name, one in schema["properties"].items()} == {
            "city": "string",
            "days": "integer",
            "unit": "string",
        }
        assert schema["required"] == ["city", "days"]
        assert schema["type"] == "object"


def tools_of(example: Example) -> dict[str, dict]:
    """The tools that the system message lists, by name."""
    if PREAMBLE not in example.system:
        return {}
    listed = example.system.split(PREAMBLE)[1].removesuffix(POSTAMBLE)
    functions = [json.loads(line)["function"] for line in listed.splitlines()]
    assert len({one["name"] for one in functions}) == len(functions)
    return {one["name"]: one["parameters"] for one in functions}


@pytest.mark.parametrize("kind", [kind for kind, _ in VARIED], ids=lambda kind: kind.__name__)
def test_what_is_right_can_be_known(kind) -> None:
    """A call is of a tool that was offered, with what it requires, all of it said before."""
    for example in islice(held_out(random.Random(2), kind), 150):
        assert example.accepts(example.answer)
        tools = tools_of(example)
        assert (PREAMBLE in example.system) == bool(tools)
        if not example.answer.startswith(TOOL_OPEN):
            continue
        for one in example.answer.split("\n" + TOOL_OPEN):
            call = json.loads(one.removeprefix(TOOL_OPEN).removesuffix(TOOL_CLOSE))
            schema = tools[call["name"]]
            assert sorted(call["arguments"]) == sorted(schema["required"])
            for name, value in call["arguments"].items():
                choices = schema["properties"][name].get("enum", ())
                for said in value if isinstance(value, list) else [value]:
                    assert said in choices or str(said) in example.full_prompt


def test_what_the_frameworks_are_asked_is_never_trained_on() -> None:
    for example in islice(varied_examples(3), 5000):
        assert FIRST.isdisjoint({example.prompt, *(prompt for prompt, _ in example.before)})


def test_kinds_are_drawn_by_weight_and_the_same_for_a_seed() -> None:
    once, again = (list(islice(varied_examples(5), 200)) for _ in range(2))
    assert once == again
    calls = sum(example.answer.startswith(TOOL_OPEN) for example in once)
    assert 50 < calls < 150
