"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat: what they ask for, what they force.

Given a checked body they say which tools the prompt shows, which may be called, what the answer is
read for, and the grammar that forces a call. They promise an error that names the field for all
that is malformed, and for a model whose template cannot offer tools.
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
from headway.frontend.text.tools import Format
from headway.frontend.text.tools.written import (
    Offered,
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
"""So much of a prompt's end tells whether it ends inside reasoning."""


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
    """What a request says of tools: `shown` in the prompt, `callable`; a call `forced`, `several`.

    A named function is forced and alone callable; the prompt shows its companions all the same.
    """

    shown: tuple[Function, ...]
    callable: tuple[Function, ...]
    forced: bool
    several: bool

    @property
    def offered(self) -> frozenset[str]:
        """The names of what may be called."""
        return frozenset(function.name for function in self.callable)

    @property
    def strict(self) -> bool:
        """Whether a grammar has to keep some function's arguments to its schema."""
        return any(function.strict for function in self.callable)

    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them; models have not seen `strict`."""
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
        """What is wrong with a call; None when it names a tool and its arguments fit."""
        found = next((f for f in self.callable if f.name == name), None)
        if found is None:
            return f"there is no tool {name[:60]!r}"
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return "the arguments are not JSON"
        if not isinstance(value, dict):
            return "the arguments are no object"
        return misfit(value, found.parameters or {})


# ── the request ─────────────────────────────────────────────────────────────────────────────


def tool_use(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """What the three fields ask for; None without tools and for the choice `none`."""
    if tools is None:
        if choice == "none":
            return None
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None:
                raise RequestError(f"{name} needs tools.", param=name, code="invalid_value")
        return None
    functions = checked_functions(tools)
    mode, names = chosen(choice, functions)
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


def checked_functions(tools: list[Tool]) -> tuple[Function, ...]:
    """The functions; raises RequestError on the tool at fault."""
    if not tools:
        raise RequestError("tools is empty.", param="tools", code="empty_array")
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are accepted.",
            param="tools",
            code="array_above_max_length",
        )
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = checked_function(tool, f"tools[{i}]")
        if function.name in functions:
            raise RequestError(
                f"tools names {function.name} twice.",
                param=f"tools[{i}].function.name",
                code="invalid_value",
            )
        functions[function.name] = function
    return tuple(functions.values())


def checked_function(tool: Tool, where: str) -> Function:
    """The function of one tool."""
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


def chosen(
    choice: str | dict[str, Any] | None, functions: tuple[Function, ...]
) -> tuple[str, frozenset[str]]:
    """The mode (none, auto, required, named) and the names of what may be called."""
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
            return allowed_tools(mode, allowed, names)
    raise choice_error(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
    )


def allowed_tools(
    mode: Any, allowed: list[Any], names: frozenset[str]
) -> tuple[str, frozenset[str]]:
    """A choice that narrows `tools` down."""
    found = set()
    for entry in allowed:
        match entry:
            case {"type": "function", "function": {"name": str(name)}} if name in names:
                found.add(name)
            case _:
                raise choice_error("tool_choice.allowed_tools names a tool that is not in tools")
    if mode not in ("auto", "required") or not found:
        raise choice_error("tool_choice.allowed_tools needs tools and a mode, auto or required")
    return mode, frozenset(found)


def choice_error(text: str) -> RequestError:
    return RequestError(f"{text}.", param="tool_choice", code="invalid_value")


def format_for(model: ServedModel) -> Format:
    """How the model writes calls; RequestError when its template does not say."""
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


def ends_inside(markers: ReasoningMarkers, tail: str, continued: str) -> bool:
    """Whether a prompt ends within reasoning: its template opened it, or the message to go on."""
    opened = continued.rfind(markers.open)
    return tail.endswith(markers.open) or opened > continued.rfind(markers.close)


def parser_spec_for(
    model: ServedModel, use: ToolUse | None, prompt: list[int], continued: str = ""
) -> OutputParserSpec | None:
    """What to look for in the answers; None when all of them is content.

    `continued` is the text of the message that the answer goes on with.
    """
    markers, thinking = model.reasoning, False
    if markers is not None:
        tokenizer = model.needs_tokenizer("messages")
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        thinking = ends_inside(markers, tail, continued)
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
    model: ServedModel, use: ToolUse, parser_spec: OutputParserSpec, wanted: Grammar | None
) -> Grammar | None:
    """The grammar of an answer with calls, around what its text must be (`wanted`).

    None where nothing has to be kept to: a free choice among tools that are not strict.
    """
    if not use.forced and not use.strict and wanted is None:
        return None
    if use.forced and wanted is not None and not wanted.param.startswith("response_format"):
        name = wanted.param.partition(".")[0]
        raise RequestError(
            f"{name} and a tool_choice that forces a call exclude each other; drop one.",
            param=name,
            code="invalid_value",
        )
    written = format_for(model).written
    answer = None
    if wanted is not None and not use.forced:
        answer = answer_schema(wanted, written.marked)
    tools = [
        Offered(
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


def after_reasoning(model: ServedModel, parser_spec: OutputParserSpec, wanted: Grammar) -> Grammar:
    """`wanted` where the prompt ends inside reasoning: thoughts are free, the text is not."""
    if wanted.kind == "json":
        answer = json_value(msgspec.json.decode(wanted.text), strict=True)
    elif wanted.kind == "json_object":
        answer = json_value({"type": "object"}, strict=True)
    elif wanted.kind == "choice":
        choices = msgspec.json.decode(wanted.text)
        answer = " | ".join(msgspec.json.encode(text).decode() for text in choices)
    elif wanted.kind == "regex":
        answer = regex_value(wanted.text)
    else:
        name = wanted.param.partition(".")[0]
        raise RequestError(
            f"{name}: a grammar cannot follow reasoning here; use a schema, a regex or a choice, "
            "or switch reasoning off by chat_template_kwargs.",
            param=name,
            code="unsupported_value",
        )
    assert parser_spec.reasoning is not None
    special = model.needs_tokenizer("messages").special(parser_spec.markers)
    text = thought_then(answer, parser_spec.reasoning.close, special)
    return Grammar(kind="structural", text=text, param=wanted.param)


def answer_schema(wanted: Grammar, marked: bool) -> dict[str, Any]:
    """The schema of text beside calls; RequestError for what cannot stand beside them."""
    if wanted.kind not in ("json", "json_object") or not marked:
        name = wanted.param.partition(".")[0]
        raise RequestError(
            f"This {name} cannot be combined with tools here; leave one of them out, or "
            'say tool_choice "none".',
            param=name,
            code="unsupported_value",
        )
    schema: dict[str, Any] = msgspec.json.decode(wanted.text) if wanted.kind == "json" else {}
    return schema
