"""Conversion of the input items of a response to the messages of a chat.

Text or a list of items is checked, given ids and turned into messages. The assistant's items
between two turns (reasoning, text, calls) become one message, as templates expect it:

    reasoning "…"                               ┐
    message assistant "Let me see."             ├ one assistant message
    function_call get_weather {"city":"Rome"}   ┘
    function_call_output "18 °C"                  one tool message
"""

from typing import Any

from headway.core.errors import RequestError
from headway.edge.chat_builder import ChatBuilder, missing_field, text_field, unsupported_value
from headway.server.responses.tools import custom_arguments, qualified_name

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ITEMS = 100_000

Item = dict[str, Any]


def with_ids(value: str | list[Item], stem: str) -> list[Item]:
    """Return items with types and ids: "hi" → [{type: message, role: user, id: …, …}]."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise RequestError("input is empty.", param="input", code="empty_array")
    if len(value) > MAX_ITEMS:
        raise RequestError(
            f"input has {len(value)} items; at most {MAX_ITEMS} are accepted.",
            param="input",
            code="array_above_max_length",
        )
    return [normalize_item(item, f"{stem}_i{i}", f"input[{i}]") for i, item in enumerate(value)]


def normalize_item(item: Item, own_id: str, where: str) -> Item:
    """Return one item with a type, an id, and a list of parts as content."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind is None:
        raise missing_field(f"{where}.type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unsupported_value(
            f"{where}.type", repr(str(kind)[:60]), f"it must be one of {', '.join(KINDS)}"
        )
    given = item.get("id")
    if given is not None and not isinstance(given, str):
        raise RequestError(
            f"{where}.id must be a string.", param=f"{where}.id", code="invalid_type"
        )
    if kind == "item_reference":
        text_field(item, "id", where)
        return item
    prefix = PREFIXES[kind]
    named = {**item, "type": kind, "id": given or f"{prefix}_{own_id}"}
    if kind != "message":
        return named
    content = item.get("content")
    if isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": content}]
    return {**named, "status": "completed"}


def add_items(chat: ChatBuilder, items: list[Item], where: str = "input") -> None:
    """Add the messages of `items` to the chat."""
    for i, item in enumerate(items):
        KINDS[item["type"]](chat, item, f"{where}[{i}]")


def add_message(chat: ChatBuilder, item: Item, where: str) -> None:
    role = text_field(item, "role", where)
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    content = chat_parts(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn = assistant_turn(chat, where, without="content")
        turn["content"] = content
    else:
        chat.add_message({"role": ROLES[role], "content": content}, where)


def add_reasoning(chat: ChatBuilder, item: Item, where: str) -> None:
    """Add the model's reasoning; an item without readable text is ignored."""
    texts = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise RequestError(
                f"{where}.{name} must be a list.", param=f"{where}.{name}", code="invalid_type"
            )
        texts = [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
        if texts:
            turn = assistant_turn(chat, where, without="reasoning_content")
            turn["reasoning_content"] = "\n".join(texts)
            return


def add_function_call(chat: ChatBuilder, item: Item, where: str) -> None:
    add_call(chat, item, text_field(item, "arguments", where), where)


def add_custom_call(chat: ChatBuilder, item: Item, where: str) -> None:
    add_call(chat, item, custom_arguments(text_field(item, "input", where)), where)


def add_call(chat: ChatBuilder, item: Item, arguments: str, where: str) -> None:
    """Add a call to the assistant's turn, with the tool's name in the chat."""
    name, call_id = text_field(item, "name", where), text_field(item, "call_id", where)
    if item.get("namespace") is not None:
        name = qualified_name(name, text_field(item, "namespace", where))
    turn = assistant_turn(chat, where)
    turn.setdefault("tool_calls", []).append(
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    )


def add_call_output(chat: ChatBuilder, item: Item, where: str) -> None:
    call_id = text_field(item, "call_id", where)
    content = chat_parts(item.get("output"), f"{where}.output")
    chat.add_message({"role": "tool", "tool_call_id": call_id, "content": content}, where)


def assistant_turn(chat: ChatBuilder, where: str, without: str = "") -> dict[str, Any]:
    """Return the open message of the assistant, or a new one where it already has `without`."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last["role"] != "assistant" or last.get(without) is not None:
        last = chat.add_message({"role": "assistant", "content": None}, where)
    return last


def chat_parts(content: Any, where: str) -> Any:
    """Return parts in the form of chat, which refuses those that are no text."""
    if content is None:
        raise missing_field(where)
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in TEXTS
        else part
        for part in content
    ]


def refuse_reference(chat: ChatBuilder, item: Item, where: str) -> None:
    """Raise RequestError for a reference that was not resolved."""
    raise RequestError(
        f"{where}: the item {item['id'][:80]!r} is not stored here.",
        param=f"{where}.id",
        code="item_not_found",
    )


KINDS = {
    "message": add_message,
    "reasoning": add_reasoning,
    "function_call": add_function_call,
    "function_call_output": add_call_output,
    "custom_tool_call": add_custom_call,
    "custom_tool_call_output": add_call_output,
    "item_reference": refuse_reference,
}
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
