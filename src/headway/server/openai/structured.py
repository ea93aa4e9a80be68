"""Structured output: every field that constrains the text of an answer, as one grammar.

`CONSTRAINTS` names the fields of OpenAI and of other servers' dialects. A body becomes a
`core.grammar.Grammar`, or None where the text is free. Size, depth and types are checked here; an
invalid schema is found when the engine compiles it, and the error names the same field.
"""

from collections.abc import Callable
from typing import Any

from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import Grammar

Reader = Callable[[Any, str], Grammar | None]
STRUCTURED: dict[str, Callable[[Any, str], Grammar]] = {
    "json": grammars.json_schema,
    "regex": grammars.regex,
    "choice": grammars.choice,
    "grammar": grammars.context_free,
}
"""`structured_outputs`: key → reader of its grammar. `json_object` is a flag besides."""
NAME_LENGTH = 64


def body_grammar(body: Any) -> Grammar | None:
    """Return the grammar of a body; RequestError where two of its fields constrain the text."""
    grammars_of: dict[str, Grammar] = {}
    for name, read in CONSTRAINTS.items():
        value = getattr(body, name, None)
        grammar = None if value is None else read(value, name)
        if grammar is not None:
            grammars_of[name] = grammar
    if len(grammars_of) > 1:
        first, second = list(grammars_of)[:2]
        raise RequestError(
            f"{first} and {second} exclude each other; give one.",
            param=second,
            code="invalid_value",
        )
    return next(iter(grammars_of.values()), None)


# ── OpenAI: response_format ─────────────────────────────────────────────────────────────────

FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
}
"""Type of a `response_format` → its other keys; llama.cpp puts a schema into `schema`."""


def response_grammar(response_format: Any, param: str = "response_format") -> Grammar | None:
    """Read text, json_object with or without a schema, or json_schema {name, schema, strict}."""
    given = check_object(response_format, param)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise RequestError(
            f"{param}.type is {str(kind)[:40]!r}; it must be text, json_object or json_schema.",
            param=f"{param}.type",
            code="missing_required_parameter" if kind is None else "invalid_value",
        )
    refuse_other_keys(given, ("type", *FORMATS[kind]), param, f"beside type {kind}")
    if kind == "text":
        return None
    named = given.get("json_schema") is not None
    if kind == "json_schema" and (named or given.get("schema") is None):
        refuse_other_keys(given, ("type", "json_schema"), param, "beside json_schema")
        return schema_grammar(given.get("json_schema"), f"{param}.json_schema")
    if given.get("schema") is None:
        return grammars.json_object(param)
    return grammars.json_schema(given["schema"], f"{param}.schema")


def schema_grammar(named: Any, param: str) -> Grammar:
    """Read {"name": …, "schema": {…}}; the schema is enforced whether `strict` or not."""
    given = check_object(named, param)
    refuse_other_keys(given, ("name", "schema", "strict", "description"), param, "here")
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


def refuse_other_keys(given: dict[str, Any], keys: tuple[str, ...], param: str, where: str) -> None:
    """Raise RequestError for a key that would be dropped: a constraint holds or is refused."""
    for key, value in given.items():
        if key not in keys and value is not None:
            name = f"{param}.{key[:80]}"
            raise RequestError(
                f"The field {name} is not supported {where}.",
                param=name,
                code="unsupported_parameter",
            )


# ── vLLM: structured_outputs ────────────────────────────────────────────────────────────────


def structured_grammar(structured: Any, param: str = "structured_outputs") -> Grammar | None:
    """Read exactly one of json, json_object, regex, choice, grammar; others may be false."""
    given = {name: v for name, v in check_object(structured, param).items() if v is not None}
    given = {name: v for name, v in given.items() if v is not False or name in STRUCTURED}
    refuse_other_keys(given, (*STRUCTURED, "json_object"), param, "here")
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


# ── Ollama, llama.cpp, SGLang: fields of their own ──────────────────────────────────────────


def ollama_grammar(schema: Any, param: str) -> Grammar | None:
    """Read "json" for any object, or a schema."""
    if schema == "json":
        return grammars.json_object(param)
    if isinstance(schema, str):
        raise RequestError(
            f'{param} is {schema[:40]!r}; it must be "json" or a JSON Schema.',
            param=param,
            code="invalid_value",
        )
    return grammars.json_schema(schema, param)


def unless_empty(read: Callable[[Any, str], Grammar | None]) -> Reader:
    """Return `read` with "" as no constraint: clients of these servers send it by default."""
    return lambda value, param: None if value == "" else read(value, param)


CONSTRAINTS: dict[str, Reader] = {
    "response_format": response_grammar,
    "structured_outputs": structured_grammar,
    "guided_json": grammars.json_schema,
    "guided_regex": grammars.regex,
    "guided_choice": grammars.choice,
    "guided_grammar": grammars.context_free,
    "json_schema": unless_empty(grammars.json_schema),
    "grammar": unless_empty(grammars.context_free),
    "regex": unless_empty(grammars.regex),
    "ebnf": unless_empty(grammars.context_free),
    "format": unless_empty(ollama_grammar),
}
"""Field of a body → its reader: of OpenAI, vLLM (old and new), llama.cpp, SGLang and Ollama."""


def check_object(value: Any, param: str) -> dict[str, Any]:
    """Return `value`, which must be an object; raises RequestError."""
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} must be an object.",
            param=param,
            code="missing_required_parameter" if value is None else "invalid_type",
        )
    return value
