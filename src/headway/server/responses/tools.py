"""The tools of a response: what a client declares as functions of a chat, and calls told back.

A client runs functions, custom tools (their input is any text) and namespaces of both. Each becomes
a function of the chat: a namespace's tool by both names, a custom one with a single string.

    function get_weather                  →  get_weather(…)
    namespace crm [function get_weather]  →  crm__get_weather(…)
    custom apply_patch                    →  apply_patch(input: string)

`Declared` leads back from a name of the chat to the tool and its namespace. Tools of other types,
which a service has to run, are refused by name.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.server.translate import Chat, missing, text_field, unsupported

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The arguments of a custom tool in the chat."""
SERVED = "functions, custom tools and namespaces of them are, which the client runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A tool as its client declared it."""

    name: str
    custom: bool = False
    namespace: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """The fields of an item that name the tool."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **namespace}


Tools = dict[str, Declared]
"""Name of a function of the chat → the tool it stands for."""


def qualified(name: str, namespace: str | None) -> str:
    """The name in the chat: get_weather of crm → crm__get_weather."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments in the chat of a custom tool's input."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The input that a custom tool's arguments hold; what the model wrote amiss as it is."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


# ── what is declared ────────────────────────────────────────────────────────────────────────


def offer_tools(
    asked: Chat,
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
) -> Tools:
    """Set the chat's tools and the choice among them; RequestError by the client's field."""
    found: Tools = {}
    functions: list[dict[str, Any]] = []
    for where, tool, namespace in flattened(tools or []):
        place = f"tools[{len(functions)}]"
        asked.names[place] = asked.names[f"{place}.function"] = where
        kind = tool.get("type")
        if kind == "custom":
            fields, told_only = custom_function(tool, where)
            asked.unheeded += told_only
            asked.names[f"{place}.function.parameters"] = f"{where}.format"
        elif kind == "function":
            fields = {name: tool[name] for name in FUNCTION_FIELDS if name in tool}
        else:
            raise unsupported(f"{where}.type", f"{str(kind)[:40]!r}, not served here", SERVED)
        name = text_field(tool, "name", where)
        space = None if namespace is None else str(namespace["name"])
        fields["name"] = qualified(name, space)
        if namespace is not None:
            about = (namespace.get("description"), fields.get("description"))
            fields["description"] = "\n".join(text for text in about if isinstance(text, str))
        declared = Declared(name=name, custom=kind == "custom", namespace=space)
        found.setdefault(fields["name"], declared)
        functions.append({"type": "function", "function": fields})
    asked.set("tools", functions or None, "tools")
    chosen = chosen_tool(choice, found)
    if functions or chosen not in (None, "auto", "none"):
        asked.set("tool_choice", chosen, "tool_choice")
        # sent by habit, without tools too
        asked.set("parallel_tool_calls", parallel if functions else None, "parallel_tool_calls")
    return found


def flattened(
    tools: list[dict[str, Any]],
) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """(its place in the body, a tool, its namespace), those of a namespace in its place."""
    found: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "namespace":
            found.append((where, tool, None))
            continue
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
            raise RequestError(
                f"{where}.tools must be a list of tools.",
                param=f"{where}.tools",
                code="invalid_type",
            )
        text_field(tool, "name", where)
        found += [(f"{where}.tools[{j}]", member, tool) for j, member in enumerate(members)]
    return found


def custom_function(tool: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """A custom tool as a function of one string, and the fields that are only told.

    A format of syntax `regex` holds the input; one of syntax `lark` is shown to the model, for a
    grammar cannot look through the escapes of a JSON string.
    """
    about = tool.get("description")
    fields: dict[str, Any] = {"parameters": INPUT}
    lines = [about] if isinstance(about, str) and about else []
    wanted, told_only = tool.get("format"), []
    match wanted:
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
            held = {"type": "string", "pattern": f"^(?:{pattern})$"}
            fields["parameters"] = {**INPUT, "properties": {"input": held}}
            fields["strict"] = True
        case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
            lines.append(f"The input follows this Lark grammar:\n{grammar}")
            told_only = [f"{where}.format"]
        case _:
            raise unsupported(
                f"{where}.format",
                "neither text nor a grammar of syntax lark or regex with its definition",
                "send one of these, or leave it out",
            )
    fields["description"] = "\n".join(lines)
    return fields, told_only


# ── the choice ──────────────────────────────────────────────────────────────────────────────


def chosen_tool(choice: str | dict[str, Any] | None, tools: Tools) -> Any:
    """`tool_choice` as chat has it: names lie one level deeper there."""
    match choice:
        case {"type": "function" | "custom"}:
            return named(choice, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            entries = [named(tool, tools) for tool in allowed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}
        case {"type": kind}:
            raise unsupported("tool_choice", repr(str(kind)[:40]), SERVED)
    return choice


def named(tool: Any, tools: Tools) -> dict[str, Any]:
    """One tool of a choice as chat names it: by its name there, or its own and its namespace's."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in ("function", "custom"):
        raise unsupported("tool_choice", f"of the type {str(kind)[:40]!r}", SERVED)
    name, namespace = tool.get("name"), tool.get("namespace")
    if name is None:
        raise missing("tool_choice.name")
    wanted = qualified(str(name), None if namespace is None else str(namespace))
    declared = tools.get(wanted)
    if declared is not None and declared.custom != (kind == "custom"):
        raise unsupported(
            "tool_choice", f"a {kind} tool {wanted[:64]!r}", "it is declared otherwise"
        )
    return {"type": "function", "function": {"name": wanted}}
