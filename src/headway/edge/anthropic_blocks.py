"""Conversion of Anthropic's blocks to the messages of a chat.

A user's tool results become tool messages before its text; an assistant's thinking, text and calls
stay one message; consecutive messages of one role are one turn, as in Anthropic's API:

    user       [tool_result "18 °C", text "And now?"]  →  tool "18 °C", user "And now?"
    assistant  [thinking "…", text "Hm", tool_use]     →  assistant with reasoning, text and a call
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.chat_builder import ChatBuilder, missing_field, text_field, unsupported_value

ROLES = ("user", "assistant", "system")
UNREADABLE = ("redacted_thinking",)
"""Types of blocks that a model here cannot read."""


def add_messages(chat: ChatBuilder, messages: list[dict[str, Any]]) -> None:
    """Add the messages to the chat; RequestError names the block at fault."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = text_field(message, "role", where)
        if role not in ROLES:
            raise RequestError(
                f"{where}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}.",
                param=f"{where}.role",
                code="invalid_value",
            )
        blocks = content_blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            add_assistant(chat, blocks, where)
        elif role == "system":
            chat.add_message(
                {"role": "system", "content": text_parts(blocks, f"{where}.content")}, where
            )
        else:
            add_user(chat, blocks, where)
    for message in chat.messages:
        if "thoughts" in message:
            message["reasoning_content"] = "".join(message.pop("thoughts"))


def content_blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """Return a content as blocks with types: "hi" → [{type: text, text: hi}]."""
    if content is None:
        raise missing_field(where)
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


def text_parts(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return blocks that must all be text as parts."""
    return [text_part(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def text_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a block that must be text as a part."""
    if block["type"] != "text":
        raise unsupported_value(
            f"{where}.type", repr(block["type"][:40]), "this model reads text blocks here"
        )
    return {"type": "text", "text": text_field(block, "text", where)}


def document_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a document of plain text as a part, with its title."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind != "text" or not isinstance(source, dict):
        raise unsupported_value(
            f"{where}.source.type", repr(str(kind)[:40]), "documents of plain text are read here"
        )
    for name in ("context", "citations"):
        if block.get(name) not in (None, "", {"enabled": False}):
            raise unsupported_value(f"{where}.{name}", "given", "leave it out")
    data = {"text": text_field(source, "data", f"{where}.source")}
    if block.get("title") is not None:
        data = {"title": text_field(block, "title", where), **data}
    return {"type": "document", "document": {"data": data}}


def image_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an image as a part: its URL, or its bytes as a data: URL."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in ("base64", "url") or not isinstance(source, dict):
        raise unsupported_value(
            f"{where}.source.type", repr(str(kind)[:40]), "it must be base64 or url"
        )
    origin = f"{where}.source"
    if kind == "url":
        url = text_field(source, "url", origin)
    else:
        media, data = text_field(source, "media_type", origin), text_field(source, "data", origin)
        url = f"data:{media};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def add_user(chat: ChatBuilder, blocks: list[dict[str, Any]], where: str) -> None:
    """Add the results of tools first, then the text."""
    parts = []
    for i, block in enumerate(blocks):
        name = f"{where}.content[{i}]"
        if block["type"] == "tool_result":
            add_tool_result(chat, block, name)
        elif block["type"] == "document":
            parts.append(document_part(block, name))
        elif block["type"] == "image" and chat.takes_images:
            parts.append(image_part(block, name))
        else:
            parts.append(text_part(block, name))
    if not parts and blocks:
        return
    last = chat.messages[-1] if chat.messages else None
    if last is not None and last["role"] == "user":
        last["content"] += parts  # the list is not the client's, so it grows in place
    else:
        chat.add_message({"role": "user", "content": parts}, where)


def add_tool_result(chat: ChatBuilder, block: dict[str, Any], where: str) -> None:
    """Add the result of a tool; an error begins with "Error:"."""
    call_id = text_field(block, "tool_use_id", where)
    content = block.get("content")
    inner = [] if content is None else content_blocks(content, f"{where}.content")
    parts = text_parts(inner, f"{where}.content")
    if block.get("is_error") is True:
        parts.insert(0, {"type": "text", "text": "Error:"})
    chat.add_message({"role": "tool", "tool_call_id": call_id, "content": parts}, where)


def add_assistant(chat: ChatBuilder, blocks: list[dict[str, Any]], where: str) -> None:
    """Add an earlier answer of the model: thinking, text, calls."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last["role"] != "assistant":
        last = chat.add_message({"role": "assistant", "content": None}, where)
    for i, block in enumerate(blocks):
        name, kind = f"{where}.content[{i}]", block["type"]
        if kind == "thinking":
            last.setdefault("thoughts", []).append(text_field(block, "thinking", name))
        elif kind == "tool_use":
            last.setdefault("tool_calls", []).append(chat_call(block, name))
        elif kind not in UNREADABLE:
            last["content"] = last["content"] or []
            last["content"].append(text_part(block, name))


def chat_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool_use block as a call of the chat."""
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
