"""What the text of an answer must be, as a client asked for it: a kind and the grammar's text.

A `Grammar` travels inside `SamplingParams` from the server to the engine, which compiles it. It is
made by one of the functions below, which refuse what is too large, too deep or of the wrong type
with a RequestError that names the field it came from.
"""

import re
from typing import Any

import msgspec

from headway.core.errors import RequestError

KINDS = ("json", "json_object", "regex", "choice", "lark", "gbnf", "structural")
MAX_TEXT_BYTES = 256_000
MAX_DEPTH = 64
MAX_CHOICES = 1000
OUTWARD = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema: bounds, and which way from them is inside; schemas by name; no schemas."""
IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
WHITESPACE = r"(\x20|\r?\n(\x20{0,32}|\x09{0,8}))"
"""Where JSON allows whitespace: one space, or a line break and the indentation after it."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """One grammar; `text` by `kind`:

    json         a JSON Schema as JSON text
    json_object  "" (any JSON object)
    regex        a regular expression that the whole answer matches
    choice       a JSON list of strings, one of which is the answer
    lark         a grammar in llguidance's dialect of Lark
    gbnf         a grammar as llama.cpp and XGrammar write it, with the rule `root`
    structural   llguidance's Lark too, written by us: tool calls and the text around them

    `param` is the field of the request it came from, for errors.
    """

    kind: str
    text: str = ""
    param: str = "grammar"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(
                f"The kind of grammar {self.kind!r} is none of {', '.join(KINDS)}.",
                param=self.param,
                code="invalid_value",
            )
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_TEXT_BYTES:
            raise RequestError(
                f"{self.param} has {size} bytes; at most {MAX_TEXT_BYTES} are accepted.",
                param=self.param,
                code="string_above_max_length",
            )

    @property
    def key(self) -> tuple[str, str]:
        """What makes two grammars the same, wherever they came from."""
        return self.kind, self.text


def json_schema(schema: Any, param: str) -> Grammar:
    """Answers that validate against `schema`, an object or its JSON text."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise RequestError(
                f"{param} is not valid JSON: {str(error)[:200]}.", param=param, code="invalid_json"
            ) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be an object.", param=param, code="invalid_type")
    if is_deeper(schema, MAX_DEPTH):
        raise RequestError(
            f"{param} is nested more than {MAX_DEPTH} deep.", param=param, code="invalid_value"
        )
    return Grammar(kind="json", text=msgspec.json.encode(apart(schema)).decode(), param=param)


def apart(schema: Any) -> Any:
    """`schema` with exclusive whole bounds of numbers moved a little, by 1e-9 for most.

    llguidance lets the bound itself pass where both have the same whole part: 2 for
    {"exclusiveMinimum": 2, "maximum": 2.5}. So that becomes 2.000000001; integers are exact.
    """
    if isinstance(schema, list):
        return [apart(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            value = {key: apart(inner) for key, inner in value.items()}
        elif name in OUTWARD and schema.get("type") != "integer" and is_whole(value):
            value += OUTWARD[name] * (1e-9 if abs(value) < 2**22 else 1e-3)
        elif name not in DATA:
            value = apart(value)
        found[name] = value
    return found


def is_whole(value: Any) -> bool:
    """Whether it is a number without a fraction that has room for one: 2, 2.0, not 1e300."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value == value // 1 and abs(value) < 10**12


def is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and lists are nested more than `limit` deep: {"a": [1]} is 2 deep."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def json_object(param: str) -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", param=param)


def regex(pattern: Any, param: str) -> Grammar:
    """Answers that match `pattern` from beginning to end."""
    return Grammar(kind="regex", text=non_empty(pattern, param), param=param)


def context_free(text: Any, param: str) -> Grammar:
    """Answers that the grammar `text` derives: GBNF, or llguidance's Lark.

    `root ::= "yes" | "no"` is GBNF (llama.cpp, XGrammar), `start: "yes" | "no"` is Lark.
    """
    text = non_empty(text, param)
    kind = "lark" if IS_LARK.search(text) or "::=" not in text else "gbnf"
    return Grammar(kind=kind, text=text, param=param)


def choice(choices: Any, param: str) -> Grammar:
    """Answers that are one of `choices`."""
    if not isinstance(choices, list) or not choices:
        raise RequestError(
            f"{param} must be a list of at least one string.",
            param=param,
            code="empty_array" if choices == [] else "invalid_type",
        )
    if len(choices) > MAX_CHOICES:
        raise RequestError(
            f"{param} has {len(choices)} entries; at most {MAX_CHOICES} are accepted.",
            param=param,
            code="array_above_max_length",
        )
    for text in choices:
        non_empty(text, param)
    return Grammar(kind="choice", text=msgspec.json.encode(choices).decode(), param=param)


def non_empty(text: Any, param: str) -> str:
    """`text`, which must be a string with something in it."""
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a string.", param=param, code="invalid_type")
    if not text:
        raise RequestError(f"{param} must not be empty.", param=param, code="invalid_value")
    return text
