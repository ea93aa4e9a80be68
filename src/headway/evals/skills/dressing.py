"""JSON Schemas and tools in the styles of different clients, for the same fields.

The styles are those of LangChain, LlamaIndex, instructor, pydantic-ai, openai-agents and the AI
SDK, and random mixtures of them. A style never changes names, types or required fields.
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
"""Orders of a schema's keys: LangChain's, openai-agents' and others; absent keys are skipped."""

DRAFT = "http://json-schema.org/draft-07/schema#"
PYTHON_TYPES = {"string": "str", "integer": "int", "number": "float", "array": "list[str]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a schema with its right value; `description` may be empty.

    `default` belongs to a field that may be omitted; None marks a required field.
    """

    name: str
    value: object
    kind: str = "string"
    description: str = ""
    choices: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaStyle:
    """The style of a client's schemas: key order, titles, descriptions, closed objects, bounds."""

    order: tuple[str, ...] = ORDERS[0]
    titled: bool = False
    described: bool = False
    closed: bool = False
    bounded: bool = False
    type_first: bool = True
    top: dict[str, object] = field(default_factory=dict)

    def schema(self, fields: list[Field]) -> dict[str, object]:
        """Return the schema of an object with these fields, in this style."""
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
        """Return the schema of one field, at least {"type": "string"}."""
        parts: dict[str, object] = {"type": field.kind}
        if field.kind == "array":
            parts["items"] = {"type": "string"}
        if field.kind == "integer" and self.bounded:
            parts |= {"minimum": -9007199254740991, "maximum": 9007199254740991}
        if field.choices:
            parts["enum"] = list(field.choices)
        if self.described and field.description:
            parts["description"] = field.description
        if field.default is not None:
            parts["default"] = field.default
        if self.titled:
            parts["title"] = field.name.replace("_", " ").title()
        return parts if self.type_first else dict(reversed(parts.items()))


def draw_style(rng: random.Random, name: str, about: str) -> SchemaStyle:
    """Draw the style of a schema called `name` with the description `about`."""
    top: dict[str, object] = {}
    if rng.random() < 0.5:
        top["title"] = rng.choice((name, f"{name}_args", name.title()))
    if about and rng.random() < 0.5:
        top["description"] = about
    return SchemaStyle(
        order=rng.choice(ORDERS),
        titled=rng.random() < 0.5,
        described=rng.random() < 0.4,
        closed=rng.random() < 0.6,
        bounded=rng.random() < 0.1,
        type_first=rng.random() < 0.5,
        top=top,
    )


def description(rng: random.Random, name: str, about: str, fields: list[Field]) -> str:
    """Return a tool's description: the text alone, after a signature, or with a list of
    arguments."""
    dice = rng.random()
    if dice < 0.25:
        signed = ", ".join(f"{field.name}: {PYTHON_TYPES[field.kind]}" for field in fields)
        return f"{name}({signed}) -> {rng.choice(('str', 'dict', 'float', 'Any'))}\n{about}"
    if dice < 0.35:
        arguments = "\n".join(f"    {field.name}: {field.description}" for field in fields)
        return f"{about}\n\nArgs:\n{arguments}"
    return "" if dice < 0.4 else about


def function(rng: random.Random, name: str, about: str, fields: list[Field]) -> dict[str, object]:
    """Return a tool in OpenAI's format, in a random style."""
    described = {
        "name": name,
        "description": description(rng, name, about, fields),
        "parameters": draw_style(rng, name, "").schema(fields),
    }
    return {"type": "function", "function": described}
