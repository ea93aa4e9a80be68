"""Blocks: from what a client sends to the messages of a chat.

A user's tool results become tool messages before its text; an assistant's thinking, text and calls
stay one message; neighbours of one role are one turn, as Anthropic has it:

    user       [tool_result "18 °C", text "And now?"]  →  tool "18 °C", user "And now?"
    assistant  [thinking "…", text "Hm", tool_use]     →  assistant with reasoning, text and a call
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.server.translate import Chat, missing, text_field, unsupported

ROLES = ("user", "assistant", "system")
UNREADABLE = ("redacted_thinking",)
"""Blocks with nothing in them that a model here could read."""


def say_messages(chat: Chat, messages: list[dict[str, Any]]) -> None:
    """Add the messages; raises RequestError by block."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = text_field(message, "role", where)
        if role not in ROLES:
            raise RequestError(
                f"{where}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}.",
                param=f"{where}.role",
                code="invalid_value",
            )
        blocks = blocks_of(message.get("content"), f"{where}.content")
        if role == "assistant":
            say_assistant(chat, blocks, where)
        elif role == "system":
            chat.say({"role": "system", "content": texts(blocks, f"{where}.content")}, where)
        else:
            say_user(chat, blocks, where)
    for said in chat.messages:
        if "thoughts" in said:
            said["reasoning_content"] = "".join(said.pop("thoughts"))


def blocks_of(content: Any, where: str) -> list[dict[str, Any]]:
    """A content as blocks with types: "hi" → [{type: text, text: hi}]."""
    if content is None:
        raise missing(where)
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or a list of blocks.", param=where, code="invalid_type"
        )
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            name = f"{where}[{i}]"
            raise RequestError(f"{name} must be an object.", param=name, code="invalid_type")
        text_field(block, "type", f"{where}[{i}]")
    return content


def texts(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Blocks that must all be text, as parts."""
    return [text_part(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def text_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """One block that must be text."""
    if block["type"] != "text":
        raise unsupported(
            f"{where}.type", repr(block["type"][:40]), "this model reads text blocks here"
        )
    return {"type": "text", "text": text_field(block, "text", where)}


def document_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A document of plain text, with its title."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind != "text" or not isinstance(source, dict):
        raise unsupported(
            f"{where}.source.type", repr(str(kind)[:40]), "documents of plain text are read here"
        )
    for name in ("context", "citations"):
        if block.get(name) not in (None, "", {"enabled": False}):
            raise unsupported(f"{where}.{name}", "given", "leave it out")
    data = {"text": text_field(source, "data", f"{where}.source")}
    if block.get("title") is not None:
        data = {"title": text_field(block, "title", where), **data}
    return {"type": "document", "document": {"data": data}}


def say_user(chat: Chat, blocks: list[dict[str, Any]], where: str) -> None:
    """Results of tools first, then the text."""
    parts = []
    for i, block in enumerate(blocks):
        name = f"{where}.content[{i}]"
        if block["type"] == "tool_result":
            say_result(chat, block, name)
        elif block["type"] == "document":
            parts.append(document_part(block, name))
        else:
            parts.append(text_part(block, name))
    if not parts and blocks:
        return
    last = chat.messages[-1] if chat.messages else None
    if last is not None and last["role"] == "user":
        last["content"] += parts  # a list of our own: it grows in place, however many messages
    else:
        chat.say({"role": "user", "content": parts}, where)


def say_result(chat: Chat, block: dict[str, Any], where: str) -> None:
    """What a tool returned; an error is told as one."""
    call_id = text_field(block, "tool_use_id", where)
    content = block.get("content")
    inner = [] if content is None else blocks_of(content, f"{where}.content")
    parts = texts(inner, f"{where}.content")
    if block.get("is_error") is True:
        parts.insert(0, {"type": "text", "text": "Error:"})
    chat.say({"role": "tool", "tool_call_id": call_id, "content": parts}, where)


def say_assistant(chat: Chat, blocks: list[dict[str, Any]], where: str) -> None:
    """What the model said before: thinking, text, calls."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last["role"] != "assistant":
        last = chat.say({"role": "assistant", "content": None}, where)
    for i, block in enumerate(blocks):
        name, kind = f"{where}.content[{i}]", block["type"]
        if kind == "thinking":
            last.setdefault("thoughts", []).append(text_field(block, "thinking", name))
        elif kind == "tool_use":
            last.setdefault("tool_calls", []).append(call_of(block, name))
        elif kind not in UNREADABLE:
            last["content"] = last["content"] or []
            last["content"].append(text_part(block, name))


def call_of(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool_use block as chat has it."""
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}.input must be an object.", param=f"{where}.input", code="invalid_type"
        )
    function = {
        "name": text_field(block, "name", where),
        "arguments": msgspec.json.encode(arguments).decode(),
    }
    return {"id": text_field(block, "id", where), "type": "function", "function": function}
