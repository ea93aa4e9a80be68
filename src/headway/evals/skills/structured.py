"""Skills that answer in JSON: extract for a given schema, tool for a given tool.

Each function takes a level, 1 to 3, and returns an example with one right answer. Tool calls have
the format of Hermes and Qwen, and the list of tools that of headway-tiny's chat template.
"""

import json
import random

from headway.evals.skills import words
from headway.evals.skills.example import TOOL_CLOSE, TOOL_OPEN, Example, phrased

FIELDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "name": ("string", words.NAMES),
    "age": ("integer", tuple(range(3, 99))),
    "city": ("string", words.TOWNS),
    "colour": ("string", words.HUES),
    "pet": ("string", words.CREATURES),
    "item": ("string", words.NOUNS),
    "count": ("integer", tuple(range(2, 60))),
}
SENTENCES = {
    "age": ("{name} is {age} years old.", "{name} is {age}.", "The age of {name} is {age}."),
    "city": ("{name} lives in {city}.", "The home of {name} is {city}."),
    "colour": ("{name} likes {colour}.", "{name} likes the colour {colour} best."),
    "pet": ("{name} has a {pet}.", "The pet of {name} is a {pet}."),
    "item": ("{name} bought a {item}.", "{name} found a {item}."),
    "count": ("{name} has {count} books.", "{name} owns {count} books."),
}
EXTRACT = (
    "Extract JSON for this schema: {schema}\n{text}",
    "Schema: {schema}\nText: {text}",
    "Fill in this schema: {schema}\n{text}",
    "Give me JSON for the schema {schema}\nText: {text}",
)


def schema_of(names: list[str]) -> dict[str, object]:
    """Return the JSON Schema of an object with these fields, all required."""
    properties = {name: {"type": FIELDS[name][0]} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def extract(rng: random.Random, level: int) -> Example:
    """Extract two fields; three or four; five from a text that also has another person's facts."""
    num_fields = (2, rng.randint(3, 4), 5)[level - 1]
    names = ["name", *rng.sample(list(SENTENCES), num_fields - 1)]
    values = {field: rng.choice(FIELDS[field][1]) for field in names}
    sentences = [rng.choice(SENTENCES[field]).format(**values) for field in names[1:]]
    rng.shuffle(sentences)
    if level == 3:
        other = {field: rng.choice(choices) for field, (_, choices) in FIELDS.items()}
        other["name"] = rng.choice([name for name in words.NAMES if name != values["name"]])
        field = rng.choice([name for name in SENTENCES if name not in names])
        sentences.append(rng.choice(SENTENCES[field]).format(**other))
    prompt = phrased(rng, EXTRACT, schema=json.dumps(schema_of(names)), text=" ".join(sentences))
    return Example(prompt=prompt, answer=json.dumps(values))


TOOLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        "Tell the weather in a city",
        ("city",),
        ("What is the weather in {city}?", "How is the weather in {city}?"),
    ),
    "get_time": (
        "Tell the time in a city",
        ("city",),
        ("What time is it in {city}?", "Tell me the time in {city}."),
    ),
    "call_person": (
        "Call a person by phone",
        ("name",),
        ("Call {name}.", "Please phone {name}.", "I want to talk to {name}."),
    ),
    "find_pet": (
        "Find a pet to adopt",
        ("pet",),
        ("Find me a {pet}.", "I would like to adopt a {pet}."),
    ),
    "paint": (
        "Paint a thing in a colour",
        ("item", "colour"),
        ("Paint the {item} {colour}.", "Please make the {item} {colour}."),
    ),
    "buy": (
        "Buy a number of things",
        ("item", "count"),
        ("Buy the {item} {count} times.", "Order {count} of the {item}."),
    ),
    "send_gift": (
        "Send a thing to a person",
        ("item", "name"),
        ("Send the {item} to {name}.", "Give {name} the {item}."),
    ),
    "book_trip": (
        "Book a trip to a city for a number of people",
        ("city", "count"),
        ("Book a trip to {city} for {count} people.", "Plan a trip for {count} to {city}."),
    ),
}
SHORT = tuple(name for name, (_, fields, _) in TOOLS.items() if len(fields) == 1)
LONG = tuple(name for name in TOOLS if name not in SHORT)

PREAMBLE = "You may call these tools:\n<tools>\n"
POSTAMBLE = (
    '\n</tools>\nTo call one, answer <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
)
"""The chat template writes a request's `tools` between these two."""


def function(name: str) -> dict[str, object]:
    """Return a tool in OpenAI's format."""
    description, fields, _ = TOOLS[name]
    described = {"name": name, "description": description, "parameters": schema_of(list(fields))}
    return {"type": "function", "function": described}


def call(name: str, arguments: dict[str, object]) -> str:
    return TOOL_OPEN + json.dumps({"name": name, "arguments": arguments}) + TOOL_CLOSE


def tool(rng: random.Random, level: int) -> Example:
    """Call the only tool; one of two or three; one of four with two arguments."""
    num_tools = (1, rng.randint(2, 3), 4)[level - 1]
    name = rng.choice(LONG if level == 3 else SHORT)
    others = [other for other in (TOOLS if level == 3 else SHORT) if other != name]
    offered = rng.sample([name, *rng.sample(others, num_tools - 1)], num_tools)
    _, fields, phrasings = TOOLS[name]
    arguments = {field: rng.choice(FIELDS[field][1]) for field in fields}
    listed = "\n".join(json.dumps(function(one)) for one in offered)
    return Example(
        system=PREAMBLE + listed + POSTAMBLE,
        prompt=phrased(rng, phrasings, **arguments),
        answer=call(name, arguments),
    )
