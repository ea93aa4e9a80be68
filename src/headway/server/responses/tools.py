"""The tools of a response, as functions of the chat, and the way back to the client's names.

A client runs functions, custom tools (their input is any text) and namespaces of both. Each becomes
a function of the chat: a namespace's tool by both names, a custom one with a single string.

    function get_weather                  →  get_weather(…)
    namespace crm [function get_weather]  →  crm__get_weather(…)
    custom apply_patch                    →  apply_patch(input: string)

`DeclaredTool` leads from a function of the chat to the tool and its namespace. Tools of other
types, which a service has to run, are refused by name.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.chat_builder import ChatBuilder, missing_field, text_field, unsupported_value
from headway.server.openai.calls import decode_object

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
CUSTOM_TOOL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of a custom tool's arguments in the chat."""
SUPPORTED_TOOLS = "functions, custom tools and namespaces of them are, which the client runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTool:
    """A tool as its client declared it."""

    name: str
    custom: bool = False
    namespace: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """Fields of an item that name the tool."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **namespace}


Tools = dict[str, DeclaredTool]
"""Name of a function in the chat → its tool."""


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name in the chat: get_weather of crm → crm__get_weather."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments in the chat of a custom tool's input."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input in a custom tool's arguments; malformed ones are returned as they are."""
    text = (decode_object(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


# ── declaration ─────────────────────────────────────────────────────────────────────────────


def offer_tools(
    builder: ChatBuilder,
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
) -> Tools:
    """Set the chat's tools and tool choice; RequestError names the client's field."""
    declared_tools: Tools = {}
    functions: list[dict[str, Any]] = []
    for where, tool, namespace in flatten_namespaces(tools or []):
        place = f"tools[{len(functions)}]"
        builder.names[place] = builder.names[f"{place}.function"] = where
        kind = tool.get("type")
        if kind == "custom":
            fields, unenforced = custom_function(tool, where)
            builder.unenforced += unenforced
            builder.names[f"{place}.function.parameters"] = f"{where}.format"
        elif kind == "function":
            fields = {name: tool[name] for name in FUNCTION_FIELDS if name in tool}
        else:
            raise unsupported_value(
                f"{where}.type", f"{str(kind)[:40]!r}, not served here", SUPPORTED_TOOLS
            )
        name = text_field(tool, "name", where)
        space = None if namespace is None else str(namespace["name"])
        fields["name"] = qualified_name(name, space)
        if namespace is not None:
            about = (namespace.get("description"), fields.get("description"))
            fields["description"] = "\n".join(text for text in about if isinstance(text, str))
        declared = DeclaredTool(name=name, custom=kind == "custom", namespace=space)
        declared_tools.setdefault(fields["name"], declared)
        functions.append({"type": "function", "function": fields})
    builder.set("tools", functions or None, "tools")
    chosen = chat_tool_choice(choice, declared_tools)
    if functions or chosen not in (None, "auto", "none"):
        builder.set("tool_choice", chosen, "tool_choice")
        # some clients send it without tools
        builder.set("parallel_tool_calls", parallel if functions else None, "parallel_tool_calls")
    return declared_tools


def flatten_namespaces(
    tools: list[dict[str, Any]],
) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Return (place in the body, tool, namespace) of each tool, with namespaces expanded."""
    flat: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "namespace":
            flat.append((where, tool, None))
            continue
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
            raise RequestError(
                f"{where}.tools must be a list of tools.",
                param=f"{where}.tools",
                code="invalid_type",
            )
        text_field(tool, "name", where)
        flat += [(f"{where}.tools[{j}]", member, tool) for j, member in enumerate(members)]
    return flat


def custom_function(tool: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return a custom tool as a function of one string, and its fields that are not enforced.

    A format of syntax `regex` is enforced; one of syntax `lark` is only shown to the model, because
    a grammar cannot look through the escapes of a JSON string.
    """
    about = tool.get("description")
    fields: dict[str, Any] = {"parameters": CUSTOM_TOOL_PARAMETERS}
    lines = [about] if isinstance(about, str) and about else []
    format, unenforced = tool.get("format"), []
    match format:
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
            held = {"type": "string", "pattern": f"^(?:{pattern})$"}
            fields["parameters"] = {**CUSTOM_TOOL_PARAMETERS, "properties": {"input": held}}
            fields["strict"] = True
        case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
            lines.append(f"The input follows this Lark grammar:\n{grammar}")
            unenforced = [f"{where}.format"]
        case _:
            raise unsupported_value(
                f"{where}.format",
                "neither text nor a grammar of syntax lark or regex with its definition",
                "send one of these, or leave it out",
            )
    fields["description"] = "\n".join(lines)
    return fields, unenforced


# ── choice ──────────────────────────────────────────────────────────────────────────────────


def chat_tool_choice(choice: str | dict[str, Any] | None, tools: Tools) -> Any:
    """Return `tool_choice` in the form of chat, where names are one level deeper."""
    match choice:
        case {"type": "function" | "custom"}:
            return chat_choice(choice, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            entries = [chat_choice(tool, tools) for tool in allowed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}
        case {"type": kind}:
            raise unsupported_value("tool_choice", repr(str(kind)[:40]), SUPPORTED_TOOLS)
    return choice


def chat_choice(tool: Any, tools: Tools) -> dict[str, Any]:
    """Return one tool of a choice in the form of chat; raises RequestError."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in ("function", "custom"):
        raise unsupported_value("tool_choice", f"of the type {str(kind)[:40]!r}", SUPPORTED_TOOLS)
    name, namespace = tool.get("name"), tool.get("namespace")
    if name is None:
        raise missing_field("tool_choice.name")
    chat_name = qualified_name(str(name), None if namespace is None else str(namespace))
    declared = tools.get(chat_name)
    if declared is not None and declared.custom != (kind == "custom"):
        raise unsupported_value(
            "tool_choice", f"a {kind} tool {chat_name[:64]!r}", "it is declared otherwise"
        )
    return {"type": "function", "function": {"name": chat_name}}
