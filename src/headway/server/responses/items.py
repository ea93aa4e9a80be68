"""Input items: from what a client sends to the messages of a chat.

Given text or a list of items they are checked, numbered and turned into messages. What an assistant
said between two turns (reasoning, text, calls) becomes one message, as templates expect it:

    reasoning "…"                               ┐
    message assistant "Let me see."             ├ one assistant message
    function_call get_weather {"city":"Rome"}   ┘
    function_call_output "18 °C"                  one tool message
"""

from typing import Any

from headway.core.errors import RequestError
from headway.server.responses.tools import custom_arguments, qualified
from headway.server.translate import Chat, missing, text_field, unsupported

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ITEMS = 100_000

Item = dict[str, Any]


def numbered(value: str | list[Item], stem: str) -> list[Item]:
    """The items with types and ids: "hi" → [{type: message, role: user, content: […], id: …}]."""
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
    return [one_item(item, f"{stem}_i{i}", f"input[{i}]") for i, item in enumerate(value)]


def one_item(item: Item, own_id: str, where: str) -> Item:
    """One item with a type, an id, and a list of parts for content."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind is None:
        raise missing(f"{where}.type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unsupported(
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


def say_items(chat: Chat, items: list[Item], where: str = "input") -> None:
    """Add the messages that `items` make."""
    for i, item in enumerate(items):
        KINDS[item["type"]](chat, item, f"{where}[{i}]")


def say_message(chat: Chat, item: Item, where: str) -> None:
    role = text_field(item, "role", where)
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    content = plain_parts(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn = assistant_turn(chat, where, without="content")
        turn["content"] = content
    else:
        chat.say({"role": ROLES[role], "content": content}, where)


def say_reasoning(chat: Chat, item: Item, where: str) -> None:
    """What the model thought; an item with nothing readable in it says nothing."""
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


def say_call(chat: Chat, item: Item, where: str) -> None:
    add_call(chat, item, text_field(item, "arguments", where), where)


def say_custom_call(chat: Chat, item: Item, where: str) -> None:
    add_call(chat, item, custom_arguments(text_field(item, "input", where)), where)


def add_call(chat: Chat, item: Item, arguments: str, where: str) -> None:
    """A call as chat has it, its tool by the name that it has there."""
    name, call_id = text_field(item, "name", where), text_field(item, "call_id", where)
    if item.get("namespace") is not None:
        name = qualified(name, text_field(item, "namespace", where))
    turn = assistant_turn(chat, where)
    turn.setdefault("tool_calls", []).append(
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    )


def say_output(chat: Chat, item: Item, where: str) -> None:
    call_id = text_field(item, "call_id", where)
    content = plain_parts(item.get("output"), f"{where}.output")
    chat.say({"role": "tool", "tool_call_id": call_id, "content": content}, where)


def assistant_turn(chat: Chat, where: str, without: str = "") -> dict[str, Any]:
    """The assistant's message that is still open, or a new one where it already has `without`."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last["role"] != "assistant" or last.get(without) is not None:
        last = chat.say({"role": "assistant", "content": None}, where)
    return last


def plain_parts(content: Any, where: str) -> Any:
    """Parts as chat knows them; what is no text is left for chat to refuse."""
    if content is None:
        raise missing(where)
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in TEXTS
        else part
        for part in content
    ]


def say_reference(chat: Chat, item: Item, where: str) -> None:
    """References are resolved before; what is left of them is not there."""
    raise RequestError(
        f"{where}: the item {item['id'][:80]!r} is not stored here.",
        param=f"{where}.id",
        code="item_not_found",
    )


KINDS = {
    "message": say_message,
    "reasoning": say_reasoning,
    "function_call": say_call,
    "function_call_output": say_output,
    "custom_tool_call": say_custom_call,
    "custom_tool_call_output": say_output,
    "item_reference": say_reference,
}
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
