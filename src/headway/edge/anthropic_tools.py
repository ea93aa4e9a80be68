"""The tools of a message: the client's own, and those that Anthropic defines and the client runs.

`CLIENT_TOOLS` has the latter as Anthropic documents them: their names and inputs are fixed, and a
body names nothing but the type. Tools that only Anthropic runs are refused by name.
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.chat_builder import ChatBuilder, missing_field, text_field, unsupported_value

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXT: dict[str, Any] = {"type": "string"}
LINE: dict[str, Any] = {"type": "integer", "minimum": 0}
RANGE: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
}


def command(name: str, *, optional: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the input schema of one command: its name, required and optional fields."""
    return {
        "type": "object",
        "properties": {"command": {"const": name}, **fields, **(optional or {})},
        "required": ["command", *fields],
        "additionalProperties": False,
    }


EDITS = [
    command("view", path=TEXT, optional={"view_range": RANGE}),
    command("create", path=TEXT, file_text=TEXT),
    command("str_replace", path=TEXT, old_str=TEXT, new_str=TEXT),
    command("insert", path=TEXT, insert_line=LINE, insert_text=TEXT),
]
MOVES = [command("delete", path=TEXT), command("rename", old_path=TEXT, new_path=TEXT)]
RESTART = {
    "type": "object",
    "properties": {"restart": {"const": True}},
    "required": ["restart"],
    "additionalProperties": False,
}
RUN = {
    "type": "object",
    "properties": {"command": TEXT},
    "required": ["command"],
    "additionalProperties": False,
}
CLIENT_TOOLS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "bash_20250124": (
        "bash",
        "Run a command in a bash session that keeps its state, or restart the session.",
        [RUN, RESTART],
    ),
    "text_editor_20250728": (
        "str_replace_based_edit_tool",
        "View, create and edit text files: view a file or a folder, create a file, replace a text "
        "that occurs once, insert a text behind a line.",
        EDITS,
    ),
    "memory_20250818": (
        "memory",
        "Keep notes from one conversation to the next as files below /memories: view, create, "
        "edit, delete and rename them.",
        [*EDITS, *MOVES],
    ),
}
"""Type of a tool → its name, its description for the model, and schemas of its inputs."""


class ToolChoice(msgspec.Struct):
    """`tool_choice`: auto, any, none, or tool with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def offer_tools(
    builder: ChatBuilder, tools: list[dict[str, Any]] | None, choice: ToolChoice | None
) -> None:
    """Set the chat's tools and tool choice; RequestError names the client's field."""
    functions: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or []):
        origin = f"tools[{i}]"
        builder.names[origin] = builder.names[f"{origin}.function"] = origin
        builder.names[f"{origin}.function.parameters"] = f"{origin}.input_schema"
        functions.append({"type": "function", "function": chat_function(tool, origin)})
    builder.set("tools", functions or None, "tools")
    if choice is not None and (functions or choice.type not in ("auto", "none")):
        builder.set("tool_choice", chat_tool_choice(choice), "tool_choice")
        parallel = False if choice.disable_parallel_tool_use else None
        builder.set("parallel_tool_calls", parallel, "tool_choice.disable_parallel_tool_use")


def chat_function(tool: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a tool as a function of the chat: `input_schema` is `parameters` there."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        return client_tool(tool, str(kind), origin)
    if tool.get("input_schema") is None:
        raise missing_field(f"{origin}.input_schema")
    given: dict[str, Any] = {
        name: tool[name] for name in ("name", "description", "strict") if name in tool
    }
    return {**given, "parameters": tool["input_schema"]}


def client_tool(tool: dict[str, Any], kind: str, origin: str) -> dict[str, Any]:
    """Return the function of a tool that Anthropic defines and the client runs."""
    if kind not in CLIENT_TOOLS:
        raise unsupported_value(
            f"{origin}.type",
            f"{kind[:40]!r}, not served here",
            f"tools of your own (custom) and {', '.join(CLIENT_TOOLS)} are, which the client runs",
        )
    name, description, inputs = CLIENT_TOOLS[kind]
    if text_field(tool, "name", origin) != name:
        raise RequestError(
            f"{origin}.name is {tool['name'][:64]!r}; that of {kind} is {name!r}.",
            param=f"{origin}.name",
            code="invalid_value",
        )
    strict = {"strict": tool["strict"]} if "strict" in tool else {}
    parameters = {"type": "object", "anyOf": inputs}
    return {"name": name, "description": description, "parameters": parameters, **strict}


def chat_tool_choice(choice: ToolChoice) -> Any:
    """Return `tool_choice` in the form of chat."""
    check_choice("tool_choice.type", choice.type, (*CHOICES, "tool"))
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise missing_field("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def check_choice(where: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Raise RequestError unless `value` is None or among `allowed`."""
    if value is not None and value not in allowed:
        raise RequestError(
            f"{where} is {value[:40]!r}; it must be one of {', '.join(allowed)}.",
            param=where,
            code="invalid_value",
        )
