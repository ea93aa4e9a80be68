"""Qwen3-Coder and Qwen3.5: each call as elements, the arguments one by one, texts without quotes.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

The schema gives the type of an argument: "5" is a string where the schema has one, else a number.
The arguments are converted to JSON: {"city": "Rome"}. Models sometimes omit <tool_call>.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.written import TEXT, Lark, OfferedTool, json_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
BEGIN_VALUE, END_VALUE = ">\n", f"\n{END_PARAMETER}\n"
NAME = re.compile(r"[^<>\s]*")
KEY = re.compile(r"[^<>\n]*")
KINDS: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
"""Python type of a JSON value → its type names in a schema."""


def parse(source: TextSource) -> Wait[None]:
    """Parse a whole answer."""
    marker = yield from source.until((OPEN, FUNCTION), source.content)
    while marker:
        source.hold(marker)
        if marker == OPEN:
            yield from source.skip_space()
        if (marker == FUNCTION or (yield from source.accept(FUNCTION))) and (
            yield from call(source)
        ):
            source.hold()
            yield from source.skip_space()
            if (yield from source.accept(CLOSE)):
                source.drop()
        source.show()
        marker = yield from source.until((OPEN, FUNCTION), source.content)


def call(source: TextSource) -> Wait[bool]:
    """Parse the text after <function=; return False, without any part, if it is no call."""
    name: list[str] = []
    yield from source.run(NAME, name.append)
    if not any(name) or not (yield from source.accept(">")):
        return False
    schema = source.schemas.get("".join(name), {})
    write = source.begin_call("".join(name))
    write("{")
    complete, before = True, ""
    while complete:
        yield from source.skip_space()
        if (yield from source.accept(END_FUNCTION)):
            break
        argument: list[str] = []
        complete = yield from parameter(source, schema, argument.append)
        write("".join([before, *argument] if argument else []))
        before = ", "
    if complete:
        write("}")
    source.end_call(complete)
    return True


def parameter(
    source: TextSource, schema: dict[str, Any], write: Callable[[str], object]
) -> Wait[bool]:
    """Write one argument and its name as JSON; return False if it is cut off."""
    key: list[str] = []
    if not (yield from source.accept(PARAMETER)):
        return False
    yield from source.run(KEY, key.append)
    if not (yield from source.accept(">")):
        return False
    text: list[str] = []
    if not (yield from source.until((END_PARAMETER,), text.append)):
        return False
    name = "".join(key)
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, dict) else None
    value = meant("".join(text).removeprefix("\n").removesuffix("\n"), declared)
    write(f"{json.dumps(name, ensure_ascii=False)}: {value}")
    return True


def meant(text: str, schema: Any) -> str:
    """Return the JSON of an argument by the types of its schema, else as a string.

    "5" becomes 5 with type number, "5" with type string or if undeclared. Without a type valid JSON
    stays as it is.
    """
    as_text = json.dumps(text, ensure_ascii=False)
    if not isinstance(schema, dict):
        return as_text
    given = schema.get("type", [])
    kinds = {given} if isinstance(given, str) else set(map(str, given))
    word = text.strip()
    if "boolean" in kinds and word in ("True", "False"):
        return word.lower()
    try:
        value = json.loads(word, parse_constant=refused)
    except (ValueError, RecursionError):
        return as_text
    fits = not kinds or kinds & set(KINDS[type(value)])
    return word if fits and not (kinds == set() and isinstance(value, str)) else as_text


def refused(constant: str) -> None:
    """Reject NaN and Infinity, which Python's parser accepts as JSON."""
    raise ValueError(constant)


@dataclass(frozen=True, slots=True)
class ElementArguments:
    """Grammar of arguments in the order of the schema, each in its element."""

    def __call__(self, lark: Lark, name: str, tool: OfferedTool) -> str:
        lark.rules["TEXT"] = TEXT
        lark.rules["x_text[lazy]"] = f"TEXT {lark.literal(END_VALUE)}"
        schema = tool.schema or {}
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            lark.rules["x_any"] = f'"{PARAMETER}" /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ ">\\n" x_text'
            return "x_any*" if tool.schema is None else ""
        needed = schema.get("required")
        needed = needed if isinstance(needed, list) else []
        parts = []
        for number, (key, inner) in enumerate(properties.items()):
            value = self.value(lark, schema, inner, tool.strict)
            lark.rules[f"{name}_{number}"] = (
                f"{lark.literal(PARAMETER + key + BEGIN_VALUE)} {value}"
            )
            parts.append(f"{name}_{number}" + ("" if key in needed else "?"))
        return " ".join(parts)

    def value(self, lark: Lark, whole: dict[str, Any], schema: Any, strict: bool) -> str:
        """Return the expression of one value and the end of its element: text, or JSON."""
        schema = schema if isinstance(schema, dict) else {}
        end = lark.literal(END_VALUE)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            texts = [
                c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in choices
            ]
            either = " | ".join(lark.literal(text) or '""' for text in texts)
            return f"({either}) {end}"
        if schema.get("type") in (None, "string") or "string" in schema["type"]:
            return "x_text"
        definitions: dict[str, Any] = {
            name: whole[name] for name in ("$defs", "definitions") if name in whole
        }
        return f"{json_value({**schema, **definitions}, strict)} {end}"
