"""What must the answer's text be: `response_format` and `structured_outputs` as one grammar.

Given the two fields of a body it returns a `core.grammar.Grammar`, or None where the text is free.
Size, depth and types are checked here; what a schema may not say is found when the engine compiles
it, and comes back with the same field named.
"""

from collections.abc import Callable
from typing import Any

from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import Grammar

STRUCTURED: dict[str, Callable[[Any, str], Grammar]] = {
    "json": grammars.json_schema,
    "regex": grammars.regex,
    "choice": grammars.choice,
    "grammar": grammars.lark,
}
"""`structured_outputs`: key → the grammar it asks for. `json_object` is a flag beside them."""
NAME_LENGTH = 64


def asked_grammar(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """The grammar a body asks for, in one field or the other."""
    formatted = response_grammar(response_format)
    structured = structured_grammar(structured_outputs)
    if formatted is not None and structured is not None:
        raise RequestError(
            "response_format and structured_outputs exclude each other; give one.",
            param="structured_outputs",
            code="invalid_value",
        )
    return formatted or structured


def response_grammar(response_format: Any, param: str = "response_format") -> Grammar | None:
    """OpenAI's: text, json_object, or json_schema with {name, schema, strict}."""
    if response_format is None:
        return None
    given = an_object(response_format, param)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return grammars.json_object(param)
    if kind == "json_schema":
        return schema_grammar(given.get("json_schema"), f"{param}.json_schema")
    raise RequestError(
        f"{param}.type is {str(kind)[:40]!r}; it must be text, json_object or json_schema.",
        param=f"{param}.type",
        code="missing_required_parameter" if kind is None else "invalid_value",
    )


def schema_grammar(named: Any, param: str) -> Grammar:
    """{"name": …, "schema": {…}}: answers that validate; `strict` or not, we always hold to it."""
    given = an_object(named, param)
    name = given.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH:
        raise RequestError(
            f"{param}.name must be a string of 1 to {NAME_LENGTH} characters.",
            param=f"{param}.name",
            code="missing_required_parameter" if name is None else "invalid_value",
        )
    if given.get("schema") is None:
        raise RequestError(
            f"{param}.schema is required.",
            param=f"{param}.schema",
            code="missing_required_parameter",
        )
    return grammars.json_schema(given["schema"], f"{param}.schema")


def structured_grammar(structured: Any, param: str = "structured_outputs") -> Grammar | None:
    """vLLM's: exactly one of json, json_object, regex, choice, grammar."""
    if structured is None:
        return None
    given = {name: v for name, v in an_object(structured, param).items() if v is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    for name in given:
        if name not in STRUCTURED and name != "json_object":
            raise RequestError(
                f"The field {param}.{name[:80]} is not supported.",
                param=f"{param}.{name[:80]}",
                code="unsupported_parameter",
            )
    if len(given) != 1:
        raise RequestError(
            f"{param} must hold exactly one of {', '.join(STRUCTURED)} and json_object; "
            f"it holds {len(given)}.",
            param=param,
            code="invalid_value",
        )
    name, value = next(iter(given.items()))
    if name == "json_object":
        return grammars.json_object(f"{param}.{name}")
    return STRUCTURED[name](value, f"{param}.{name}")


def an_object(value: Any, param: str) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} must be an object.",
            param=param,
            code="missing_required_parameter" if value is None else "invalid_type",
        )
    return value
