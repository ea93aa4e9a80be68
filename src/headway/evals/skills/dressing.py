"""JSON Schemas and tools as the clients of today write them: the same fields, dressed variously.

It is given fields and a `random.Random`, and returns what LangChain, LlamaIndex, instructor,
pydantic-ai, openai-agents or the AI SDK might send for them, or a mixture that none of them sends.
It promises that a dress changes nothing of what is right: names, types, what is required.
"""

import random
from dataclasses import dataclass, field

ORDERS = (
    ("properties", "required", "type"),
    ("properties", "required", "title", "type", "additionalProperties"),
    ("description", "properties", "required", "title", "type", "additionalProperties"),
    ("additionalProperties", "description", "properties", "required", "title", "type"),
    ("$schema", "type", "properties", "required", "additionalProperties"),
    ("type", "properties", "required", "additionalProperties", "title"),
    ("type", "title", "description", "required", "properties", "additionalProperties"),
)
"""Orders of a schema's keys: LangChain's, openai-agents' and so on; absent keys fall out."""

DRAFT = "http://json-schema.org/draft-07/schema#"
PYTHON_TYPES = {"string": "str", "integer": "int", "number": "float", "array": "list[str]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a schema with the value that is right; `told` describes it, where it is told.

    `default` is that of a field which may be left out; None says that it must be there.
    """

    name: str
    value: object
    kind: str = "string"
    told: str = ""
    choices: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dress:
    """What a client adds to a schema: titles, descriptions, and whether other keys are refused."""

    order: tuple[str, ...] = ORDERS[0]
    titled: bool = False
    described: bool = False
    closed: bool = False
    bounded: bool = False
    type_first: bool = True
    top: dict[str, object] = field(default_factory=dict)

    def schema(self, fields: list[Field]) -> dict[str, object]:
        """The schema of an object with these fields, its keys in this dress's order."""
        parts: dict[str, object] = {
            "type": "object",
            "properties": {field.name: self.property(field) for field in fields},
            "required": [field.name for field in fields if field.default is None],
            "additionalProperties": False,
            "$schema": DRAFT,
            **self.top,
        }
        if not self.closed:
            del parts["additionalProperties"]
        return {key: parts[key] for key in self.order if key in parts}

    def property(self, field: Field) -> dict[str, object]:
        """One field: {"title": "City", "type": "string"}, or with more or less than that."""
        parts: dict[str, object] = {"type": field.kind}
        if field.kind == "array":
            parts["items"] = {"type": "string"}
        if field.kind == "integer" and self.bounded:
            parts |= {"minimum": -9007199254740991, "maximum": 9007199254740991}
        if field.choices:
            parts["enum"] = list(field.choices)
        if self.described and field.told:
            parts["description"] = field.told
        if field.default is not None:
            parts["default"] = field.default
        if self.titled:
            parts["title"] = field.name.replace("_", " ").title()
        return parts if self.type_first else dict(reversed(parts.items()))


def dress(rng: random.Random, name: str, about: str) -> Dress:
    """A client's way of writing a schema called `name` that is `about` something."""
    top: dict[str, object] = {}
    if rng.random() < 0.5:
        top["title"] = rng.choice((name, f"{name}_args", name.title()))
    if about and rng.random() < 0.5:
        top["description"] = about
    return Dress(
        order=rng.choice(ORDERS),
        titled=rng.random() < 0.5,
        described=rng.random() < 0.4,
        closed=rng.random() < 0.6,
        bounded=rng.random() < 0.1,
        type_first=rng.random() < 0.5,
        top=top,
    )


def description(rng: random.Random, name: str, about: str, fields: list[Field]) -> str:
    """What a tool is said to do: the text alone, after its signature, or with its arguments."""
    dice = rng.random()
    if dice < 0.25:
        signed = ", ".join(f"{field.name}: {PYTHON_TYPES[field.kind]}" for field in fields)
        return f"{name}({signed}) -> {rng.choice(('str', 'dict', 'float', 'Any'))}\n{about}"
    if dice < 0.35:
        arguments = "\n".join(f"    {field.name}: {field.told}" for field in fields)
        return f"{about}\n\nArgs:\n{arguments}"
    return "" if dice < 0.4 else about


def function(rng: random.Random, name: str, about: str, fields: list[Field]) -> dict[str, object]:
    """A tool as OpenAI's API describes it, in some client's dress."""
    described = {
        "name": name,
        "description": description(rng, name, about, fields),
        "parameters": dress(rng, name, "").schema(fields),
    }
    return {"type": "function", "function": described}
