"""Grammars of tool calls: force a call, and arguments that match the schema.

`calls_grammar` makes llguidance's Lark from the tools and the format of a call. Example, Hermes and
one required tool:

    start: call (between call){0,31}
    call: "<tool_call>\\n{\\"name\\": \\"" call_0
    call_0: "get_weather\\", \\"arguments\\": " %json {"type": "object", …} "}\\n</tool_call>"

A mark that is a special token is written as its id, <[151657]>, because text never matches it.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.core.grammar import move_exclusive_bounds

MAX_CALLS = 32
"""Most calls of one answer under a grammar."""
MAX_DEPTH = 8
"""Depth of a schema beyond which Gemma's arguments may be any value."""
MAX_RANGE, MAX_ITEMS = 256, 64
"""Largest integer range and list length that Gemma's grammar enforces."""
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's json.dumps writes it, which is how chat templates show it to models."""
TEXT = r"/(.|\n)*/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
BEYOND_PROPERTIES = frozenset(
    "additionalProperties patternProperties unevaluatedProperties propertyNames minProperties "
    "maxProperties $ref $dynamicRef allOf anyOf oneOf not if dependencies dependentSchemas".split()
)
"""Keywords of an object's schema by which it may have more than its `properties`."""


@dataclass(slots=True)
class Lark:
    """Builder of a grammar: its rules, and the ids of marks that are special tokens."""

    special: dict[str, int] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)

    def literal(self, text: str) -> str:
        """Return `text` as an expression; a special mark in it is separate: "a" <[7]> "b"."""
        if not text:
            return ""
        marks = "|".join(map(re.escape, self.special)) or r"(?!)"
        parts = [part for part in re.split(f"({marks})", text) if part]
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part)
            for part in parts
        )

    def text(self) -> str:
        """Return the grammar, `start` first."""
        lines = [f"{name}: {body}" for name, body in self.rules.items()]
        return "\n".join(["%llguidance {}", *lines]) + "\n"


class Arguments(Protocol):
    """Function that adds the rules of a tool's arguments and returns their expression."""

    def __call__(self, lark: Lark, name: str, tool: "OfferedTool") -> str: ...


def json_arguments(lark: Lark, name: str, tool: "OfferedTool") -> str:
    """Return the expression of JSON arguments that match the tool's schema."""
    schema = {} if tool.schema is None else only_declared(tool.schema)
    return json_value({**ANY_OBJECT, **schema}, tool.strict)


def only_declared(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` without undeclared arguments, unless a keyword refers to them.

    JSON Schema allows an object to have more; a function called with more fails.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if BEYOND_PROPERTIES & schema.keys() or not isinstance(properties, dict):
        return schema
    if not isinstance(required, list) or any(name not in properties for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def json_value(schema: dict[str, Any], strict: bool) -> str:
    """Return the expression of JSON for `schema`; unless `strict`, bad keywords are ignored."""
    style = {**STYLE, "lenient": not strict}
    return "%json " + json.dumps(
        {**move_exclusive_bounds(schema), "x-guidance": style}, ensure_ascii=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Texts around names and arguments; `marked` if no plain text begins like a call."""

    before_name: str
    after_name: str
    after_arguments: str
    opens: str = ""
    between: str = ""
    closes: str = ""
    marked: bool = True
    arguments: Arguments = json_arguments

    def mark(self) -> str:
        """Return the mark with which only calls begin: "<tool_call>", "[TOOL_CALLS]"."""
        match = re.match(r"<[^>]*>|\[[^\]]*\]", self.opens or self.before_name)
        return match[0] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """Tool of a grammar; without a schema any object is allowed.

    `strict`: an unsupported keyword of the schema is an error.
    """

    name: str
    schema: dict[str, Any] | None = None
    strict: bool = False


def calls_grammar(
    written: Written,
    tools: list[OfferedTool],
    *,
    forced: bool,
    several: bool,
    special: dict[str, int] | None = None,
    thinks: tuple[str, str] | None = None,
    thinking: bool = False,
    answer: dict[str, Any] | None = None,
) -> str:
    """Return the Lark of an answer that calls `tools`: only calls if `forced`, else text and calls.

    `several` calls or one; `thinks` are the marks around reasoning, which may come first; with
    `thinking` the prompt ends inside it. Text without calls must match the `answer` schema, if any.
    """
    lark = Lark(special or {})
    lark.rules["start"] = ""
    names = []
    for number, tool in enumerate(tools):
        names.append(name := f"call_{number}")
        arguments = written.arguments(lark, name, tool)
        before = lark.literal(tool.name + written.after_name)
        lark.rules[name] = f"{before} {arguments} {lark.literal(written.after_arguments)}"
    lark.rules["called"] = " | ".join(names)
    if forced or answer is not None or not written.marked:
        start = all_calls(lark, written, several)
        if answer is not None:
            lark.rules["calls"] = start
            lark.rules["answer"] = json_value(answer, strict=True)
            start = "calls | answer"
        elif not forced:
            lark.rules["calls"] = start
            lark.rules["other"] = r"/([^{](.|\n)*)?/"
            start = "calls | other"
        lark.rules["body"] = start
        lark.rules["start"] = reasoning_first(lark, thinks, thinking) + "body"
    else:
        lark.rules["start"] = text_and_calls(lark, written, several)
    return lark.text()


def thought_then(answer: str, closes: str, special: dict[str, int] | None = None) -> str:
    """Return the Lark of an answer whose prompt ends inside reasoning, followed by `answer`.

    `answer` is an expression: of `json_value`, of `regex_value`, or texts in quotes.
    """
    lark = Lark(special or {})
    lark.rules["start"] = ""
    lark.rules["start"] = reasoning_first(lark, ("", closes), thinking=True) + "answer"
    lark.rules["answer"] = answer
    return lark.text()


def regex_value(pattern: str) -> str:
    """Return a regular expression in Lark's syntax: a/b → /a\\/b/."""
    one_line = pattern.replace("\n", "\\n")
    return "/" + re.sub(r"\\.|/", lambda m: m[0] if len(m[0]) > 1 else "\\/", one_line) + "/"


def all_calls(lark: Lark, written: Written, several: bool) -> str:
    """Return the expression of calls alone."""
    lark.rules["call"] = f"{lark.literal(written.before_name)} called"
    more = f"({lark.literal(written.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    return f"{lark.literal(written.opens)} call {more} {lark.literal(written.closes)}"


def text_and_calls(lark: Lark, written: Written, several: bool) -> str:
    """Return the expression of free text in which the mark of a call starts a valid call."""
    mark = written.mark()
    rest = lark.literal((written.opens or written.before_name)[len(mark) :])
    if written.opens:
        lark.rules["call"] = f"{lark.literal(written.before_name)} called"
        more = f"({lark.literal(written.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
        rest = f"{rest} call {more} {lark.literal(written.closes)}"
    else:
        rest = f"{rest} called"
    if mark in lark.special:
        lark.rules["marked"] = f"TEXT {lark.literal(mark)}"
    else:
        lark.rules["marked[lazy]"] = f"TEXT {lark.literal(mark)}"
    lark.rules["unit"] = f"marked {rest}"
    lark.rules["TEXT"] = TEXT
    return f"unit{{0,{MAX_CALLS}}} TEXT" if several else "unit? TEXT"


def reasoning_first(lark: Lark, thinks: tuple[str, str] | None, thinking: bool) -> str:
    """Return the expression of reasoning before a call, as the beginning of `start`."""
    if thinks is None:
        return ""
    opens, closes = thinks
    lark.rules["TEXT"] = TEXT
    lazy = "" if closes in lark.special else "[lazy]"
    lark.rules[f"thought{lazy}"] = f"TEXT {lark.literal(closes)}"
    lark.rules["GAP"] = r"/[ \n]{0,4}/"
    return "thought GAP " if thinking else f"({lark.literal(opens)} thought GAP)? "


# ── Gemma's arguments: {city:<|"|>Rome<|"|>,days:[1,2]} ─────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """Arguments with bare keys and strings between `quote`s, from the simple parts of a schema.

    Enforced are types, properties, required, items, enum, const, and small values of minItems,
    maxItems and an integer's minimum with maximum; other keywords are ignored.
    """

    quote: str

    def __call__(self, lark: Lark, name: str, tool: OfferedTool) -> str:
        quote = lark.literal(self.quote)
        if self.quote in lark.special:
            lark.rules["g_string"] = f"{quote} {TEXT} {quote}"
        else:
            lark.rules["g_string"] = f"{quote} /[^<]*/ {quote}"
        lark.rules["g_number"] = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/"
        lark.rules["g_integer"] = r"/-?(0|[1-9][0-9]{0,15})/"
        lark.rules["g_pair"] = r'/[A-Za-z_][A-Za-z0-9_-]{0,63}/ ":" g_value'
        lark.rules["g_object"] = '"{" (g_pair ("," g_pair)*)? "}"'
        lark.rules["g_array"] = '"[" (g_value ("," g_value)*)? "]"'
        lark.rules["g_value"] = (
            'g_string | g_number | "true" | "false" | "null" | g_object | g_array'
        )
        return self.expression(lark, name, {**ANY_OBJECT, **(tool.schema or {})}, 0)

    def expression(self, lark: Lark, name: str, schema: Any, depth: int) -> str:
        """Return the expression of a value of this schema."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return "g_value"
        only = [schema["const"]] if "const" in schema else None
        choices = only or schema.get("enum") or small_range(schema)
        if isinstance(choices, list) and choices:
            return "(" + " | ".join(self.constant(lark, choice) for choice in choices) + ")"
        kind = schema.get("type")
        if isinstance(kind, list):
            one_by_one = [
                self.expression(lark, f"{name}_{i}", {**schema, "type": one}, depth + 1)
                for i, one in enumerate(kind)
            ]
            return "(" + " | ".join(one_by_one or ["g_value"]) + ")"
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return self.members(lark, name, schema, depth)
        if kind == "array":
            item = self.expression(lark, f"{name}_item", schema.get("items"), depth + 1)
            return list_of(item, schema.get("minItems"), schema.get("maxItems"))
        return SIMPLE.get(kind, "g_value") if isinstance(kind, str) else "g_value"

    def constant(self, lark: Lark, value: Any) -> str:
        """Return the expression of one value of an enum."""
        if isinstance(value, str):
            return lark.literal(self.quote + value + self.quote)
        return lark.literal(json.dumps(value))

    def members(self, lark: Lark, name: str, schema: dict[str, Any], depth: int) -> str:
        """Return the expression of an object with its properties in order.

        Rule `name_i_1` has the properties from the i-th on after another one (with a comma),
        `name_i_0` the same as the first ones.
        """
        properties = list(schema["properties"].items())
        required = schema.get("required")
        needed = set(map(str, required)) if isinstance(required, list) else set()
        lark.rules[f"{name}_{len(properties)}_0"] = lark.rules[f"{name}_{len(properties)}_1"] = '""'
        for number in reversed(range(len(properties))):
            key, inner = properties[number]
            value = self.expression(lark, f"{name}_{number}v", inner, depth + 1)
            for after in (0, 1):
                comma = '"," ' if after else ""
                present = f"{comma}{lark.literal(key + ':')} {value} {name}_{number + 1}_1"
                left_out = "" if key in needed else f" | {name}_{number + 1}_{after}"
                lark.rules[f"{name}_{number}_{after}"] = present + left_out
        return f'("{{" {name}_0_0 "}}")'


def list_of(item: str, low: Any, high: Any) -> str:
    """Return the expression of a list of `low` to `high` items, if these are small numbers."""
    few = low if type(low) is int and 0 < low <= MAX_ITEMS else 0
    if type(high) is not int or not few <= high <= MAX_ITEMS:
        high = None
    if high == 0:
        return '("[" "]")'
    rest = f"{{{max(few - 1, 0)},{'' if high is None else high - 1}}}"
    return f'("[" ({item} ("," {item}){rest}){"" if few else "?"} "]")'


def small_range(schema: dict[str, Any]) -> list[int]:
    """Return the integers from a schema's minimum to its maximum if few: 1 and 3 → 1, 2, 3."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") != "integer" or type(low) is not int or type(high) is not int:
        return []
    return list(range(low, high + 1)) if high - low < MAX_RANGE else []


SIMPLE = {
    "string": "g_string",
    "number": "g_number",
    "integer": "g_integer",
    "boolean": '("true" | "false")',
    "null": '"null"',
    "object": "g_object",
}
