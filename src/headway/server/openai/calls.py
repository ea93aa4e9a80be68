"""Tool calls in the messages of a chat, and the messages that answer them.

Messages become what chat templates expect: arguments are objects, and a tool's message has the name
of its function. A malformed call is refused by name.
"""

import hashlib
import string
from typing import Any

import msgspec

from headway.core.errors import RequestError

ID_LENGTH = 9
ID_CHARACTERS = string.digits + string.ascii_letters


def template_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return an assistant's `tool_calls` as templates expect them, with arguments as objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list.", param=where, code="invalid_type")
    return [template_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def template_call(call: Any, where: str) -> dict[str, Any]:
    """Return one call as templates expect it; RequestError names a malformed field."""
    if not isinstance(call, dict):
        raise RequestError(f"{where} must be an object.", param=where, code="invalid_type")
    if call.get("type", "function") != "function":
        raise RequestError(
            f"{where}.type is {str(call['type'])[:40]!r}; only function is supported.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f"{where}.function must be an object.", param=f"{where}.function", code="invalid_type"
        )
    texts = {
        f"{where}.id": call.get("id"),
        f"{where}.function.name": function.get("name"),
        f"{where}.function.arguments": function.get("arguments"),
    }
    for name, value in texts.items():
        if value is None:
            raise RequestError(
                f"{name} is required.", param=name, code="missing_required_parameter"
            )
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string.", param=name, code="invalid_type")
    return {
        "id": call["id"],
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": parse_arguments(function["arguments"]),
        },
    }


def parse_arguments(text: str) -> Any:
    """Return arguments as an object; text that is no JSON object stays as it is."""
    value = decode_object(text or "{}")
    return text if value is None else value


def decode_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text that a model wrote, None where it is none."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def call_names(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Return call id → function of all calls: {"call_1": "get_weather"}."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {call["id"]: call["function"]["name"] for call in calls}


def check_tool_message(message: dict[str, Any], where: str) -> None:
    """Raise RequestError where a tool's message does not name the call it answers."""
    call_id = message.get("tool_call_id")
    if call_id is None:
        raise RequestError(
            f"{where}.tool_call_id is required.",
            param=f"{where}.tool_call_id",
            code="missing_required_parameter",
        )
    if not isinstance(call_id, str):
        raise RequestError(
            f"{where}.tool_call_id must be a string.",
            param=f"{where}.tool_call_id",
            code="invalid_type",
        )


def shorten_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of nine letters and digits, as Mistral's templates require."""
    return [shorten_message_ids(message) for message in messages]


def shorten_message_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Shorten the ids of one message; the same id becomes the same short one everywhere."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = shorten_id(message["tool_call_id"])
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        changed["tool_calls"] = [{**call, "id": shorten_id(call["id"])} for call in calls]
    return changed


def shorten_id(call_id: str) -> str:
    """Return an id of nine characters as it is, another by its hash: "call_x…" → "7Gh2…"."""
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    letters = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ID_CHARACTERS))
        letters.append(ID_CHARACTERS[digit])
    return "".join(letters)
