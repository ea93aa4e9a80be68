"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat.

From a checked body come the tools that the prompt shows, those that may be called, the parser of
the answer, and the grammar that forces a call. Errors name the malformed field; a model whose chat
template cannot offer tools is refused as well.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.grammar import MAX_DEPTH, Grammar, is_deeper
from headway.edge.conforms import misfit
from headway.frontend.text import OutputParserSpec
from headway.frontend.text.output_parser import ReasoningMarkers
from headway.frontend.text.tools import ToolFormat
from headway.frontend.text.tools.written import (
    OfferedTool,
    calls_grammar,
    json_value,
    regex_value,
    thought_then,
)
from headway.server.models import ServedModel

MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MODES = ("none", "auto", "required")
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends inside reasoning."""


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tools[i].function`: `parameters` is a JSON Schema, without it the function takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """`tools[i]`."""

    type: str
    function: Function | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of a request: `shown` in the prompt, `callable`; a call is `forced`, `several` allowed.

    A named function is forced and the only callable one; the prompt shows the others as well.
    """

    shown: tuple[Function, ...]
    callable: tuple[Function, ...]
    forced: bool
    several: bool

    @property
    def offered(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(function.name for function in self.callable)

    @property
    def strict(self) -> bool:
        """Whether a grammar has to enforce the schema of some function's arguments."""
        return any(function.strict for function in self.callable)

    def prompt_tools(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates expect them, without `strict`."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": function.parameters or NO_PARAMETERS,
                },
            }
            for function in self.shown
        ]

    def fault(self, name: str, arguments: str) -> str | None:
        """Return what is wrong with a call; None where its tool exists and its arguments fit."""
        function = next((f for f in self.callable if f.name == name), None)
        if function is None:
            return f"there is no tool {name[:60]!r}"
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return "the arguments are not JSON"
        if not isinstance(value, dict):
            return "the arguments are no object"
        return misfit(value, function.parameters or {})


# ── the request ─────────────────────────────────────────────────────────────────────────────


def tool_use(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Return what the three fields ask for; None without tools and for the choice `none`."""
    if tools is None:
        if choice == "none":
            return None
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None:
                raise RequestError(f"{name} needs tools.", param=name, code="invalid_value")
        return None
    functions = check_functions(tools)
    mode, names = resolve_choice(choice, functions)
    if mode == "none":
        return None
    callable_ = tuple(f for f in functions if f.name in names)
    forced = mode != "auto"
    return ToolUse(
        shown=functions if forced else callable_,
        callable=callable_,
        forced=forced,
        several=parallel is not False and mode != "named",
    )


def check_functions(tools: list[Tool]) -> tuple[Function, ...]:
    """Return the functions; RequestError names the tool at fault."""
    if not tools:
        raise RequestError("tools is empty.", param="tools", code="empty_array")
    if len(tools) > MAX_TOOLS:
        cause = f"tools has {len(tools)} entries; at most {MAX_TOOLS} are accepted."
        raise RequestError(cause, param="tools", code="array_above_max_length")
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = check_function(tool, f"tools[{i}]")
        if function.name in functions:
            raise RequestError(
                f"tools names {function.name} twice.",
                param=f"tools[{i}].function.name",
                code="invalid_value",
            )
        functions[function.name] = function
    return tuple(functions.values())


def check_function(tool: Tool, where: str) -> Function:
    """Return the function of one tool; raises RequestError."""
    if tool.type != "function":
        raise RequestError(
            f"{where}.type is {tool.type[:40]!r}; only function is supported.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    function = tool.function
    if function is None:
        raise RequestError(
            f"The field {where}.function is required.",
            param=f"{where}.function",
            code="missing_required_parameter",
        )
    if not NAME.fullmatch(function.name):
        raise RequestError(
            f"{where}.function.name is {function.name[:80]!r}; it must be 1 to 128 letters, "
            "digits, _ or -.",
            param=f"{where}.function.name",
            code="invalid_value",
        )
    parameters = f"{where}.function.parameters"
    if function.parameters and function.parameters.get("type", "object") != "object":
        raise RequestError(
            f'{parameters} must be a schema of type "object".',
            param=parameters,
            code="invalid_value",
        )
    if function.parameters and is_deeper(function.parameters, MAX_DEPTH):
        raise RequestError(
            f"{parameters} is nested more than {MAX_DEPTH} deep.",
            param=parameters,
            code="invalid_value",
        )
    return function


def resolve_choice(
    choice: str | dict[str, Any] | None, functions: tuple[Function, ...]
) -> tuple[str, frozenset[str]]:
    """Return the mode (none, auto, required, named) and the names that may be called."""
    names = frozenset(function.name for function in functions)
    if choice is None:
        return "auto", names
    if isinstance(choice, str):
        if choice not in MODES:
            raise choice_error(f"tool_choice is {choice[:40]!r}; it must be {', '.join(MODES)}")
        return choice, names
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise choice_error(f"tool_choice names {name[:64]!r}, which is not in tools")
            return "named", frozenset([name])
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            return resolve_allowed_tools(mode, allowed, names)
    raise choice_error(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
    )


def resolve_allowed_tools(
    mode: Any, allowed: list[Any], names: frozenset[str]
) -> tuple[str, frozenset[str]]:
    """Return the mode and the names of a choice that restricts `tools`."""
    chosen = set()
    for entry in allowed:
        match entry:
            case {"type": "function", "function": {"name": str(name)}} if name in names:
                chosen.add(name)
            case _:
                raise choice_error("tool_choice.allowed_tools names a tool that is not in tools")
    if mode not in ("auto", "required") or not chosen:
        raise choice_error("tool_choice.allowed_tools needs tools and a mode, auto or required")
    return mode, frozenset(chosen)


def choice_error(text: str) -> RequestError:
    return RequestError(f"{text}.", param="tool_choice", code="invalid_value")


def format_for(model: ServedModel) -> ToolFormat:
    """Return the model's format of calls; RequestError where its template has none."""
    if model.format is None:
        raise RequestError(
            "The chat template of this model offers no tools, or in no format that is known here; "
            "serve a model that was trained for them, or start the server with a --chat-template "
            "that writes them and --tool-call-parser, or with --tool-call-parser generic, which "
            "describes them in the system message.",
            param="tools",
            code="unsupported_parameter",
        )
    return model.format


# ── the answer ──────────────────────────────────────────────────────────────────────────────


def ends_in_reasoning(markers: ReasoningMarkers, tail: str, continued: str) -> bool:
    """Whether a prompt ends inside reasoning, opened by its template or the continued message."""
    opened = continued.rfind(markers.open)
    return tail.endswith(markers.open) or opened > continued.rfind(markers.close)


def parser_spec_for(
    model: ServedModel, use: ToolUse | None, prompt: list[int], continued: str = ""
) -> OutputParserSpec | None:
    """Return the parser of the answers; None where all text is content.

    `continued` is the text of the message that the answer continues.
    """
    markers, thinking = model.reasoning, False
    if markers is not None:
        tokenizer = model.needs_tokenizer("messages")
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        thinking = ends_in_reasoning(markers, tail, continued)
        markers = None if tail.endswith(markers.close) else markers
    if use is None and markers is None:
        return None
    return OutputParserSpec(
        format=format_for(model) if use else None,
        reasoning=markers,
        thinking=thinking,
        offered=use.offered if use else frozenset(),
        single=use is not None and not use.several,
        forced=use is not None and use.forced,
        schemas={f.name: f.parameters or {} for f in use.callable} if use else {},
    )


def grammar_for(
    model: ServedModel, use: ToolUse, parser_spec: OutputParserSpec, grammar: Grammar | None
) -> Grammar | None:
    """Return the grammar of an answer with calls, around that of its text (`grammar`).

    None where nothing is enforced: a free choice among tools that are not strict.
    """
    if not use.forced and not use.strict and grammar is None:
        return None
    if use.forced and grammar is not None and not grammar.param.startswith("response_format"):
        name = grammar.param.partition(".")[0]
        raise RequestError(
            f"{name} and a tool_choice that forces a call exclude each other; drop one.",
            param=name,
            code="invalid_value",
        )
    written = format_for(model).written
    answer = None
    if grammar is not None and not use.forced:
        answer = answer_schema(grammar, written.marked)
    tools = [
        OfferedTool(
            name=f.name,
            schema=(f.parameters or NO_PARAMETERS) if f.strict or use.forced else None,
            strict=bool(f.strict),
        )
        for f in use.callable
    ]
    markers = parser_spec.reasoning
    text = calls_grammar(
        written,
        tools,
        forced=use.forced,
        several=use.several,
        special=model.needs_tokenizer("tools").special(parser_spec.markers),
        thinks=(markers.open, markers.close) if markers else None,
        thinking=parser_spec.thinking,
        answer=answer,
    )
    return Grammar(kind="structural", text=text, param="tools")


def grammar_after_reasoning(
    model: ServedModel, parser_spec: OutputParserSpec, grammar: Grammar
) -> Grammar:
    """Return `grammar` after free reasoning, for a prompt that ends inside reasoning."""
    if grammar.kind == "json":
        answer = json_value(msgspec.json.decode(grammar.text), strict=True)
    elif grammar.kind == "json_object":
        answer = json_value({"type": "object"}, strict=True)
    elif grammar.kind == "choice":
        choices = msgspec.json.decode(grammar.text)
        answer = " | ".join(msgspec.json.encode(text).decode() for text in choices)
    elif grammar.kind == "regex":
        answer = regex_value(grammar.text)
    else:
        name = grammar.param.partition(".")[0]
        raise RequestError(
            f"{name}: a grammar cannot follow reasoning here; use a schema, a regex or a choice, "
            "or switch reasoning off by chat_template_kwargs.",
            param=name,
            code="unsupported_value",
        )
    assert parser_spec.reasoning is not None
    special = model.needs_tokenizer("messages").special(parser_spec.markers)
    text = thought_then(answer, parser_spec.reasoning.close, special)
    return Grammar(kind="structural", text=text, param=grammar.param)


def answer_schema(grammar: Grammar, marked: bool) -> dict[str, Any]:
    """Return the schema of text besides calls; RequestError where they cannot be combined."""
    if grammar.kind not in ("json", "json_object") or not marked:
        name = grammar.param.partition(".")[0]
        raise RequestError(
            f"This {name} cannot be combined with tools here; leave one of them out, or "
            'say tool_choice "none".',
            param=name,
            code="unsupported_value",
        )
    schema: dict[str, Any] = msgspec.json.decode(grammar.text) if grammar.kind == "json" else {}
    return schema
