"""Tool calls in the messages of a chat, and what tools answered.

Given messages as clients send them they become what chat templates expect: arguments are objects, a
tool's message has the name of its function. What is malformed is refused by name.
"""

import hashlib
import string
from typing import Any

import msgspec

from headway.core.errors import RequestError

ID_LENGTH = 9
ID_CHARACTERS = string.digits + string.ascii_letters


def checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """An assistant's `tool_calls` as templates expect them: arguments are objects, not text."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list.", param=where, code="invalid_type")
    return [checked_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def checked_call(call: Any, where: str) -> dict[str, Any]:
    """One call."""
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
            "arguments": parsed_arguments(function["arguments"]),
        },
    }


def parsed_arguments(text: str) -> Any:
    """The object that arguments are; text that is none stays what the model once wrote."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        return text
    return value if isinstance(value, dict) else text


def called_names(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Call id → function, of all checked calls: {"call_1": "get_weather"}."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {call["id"]: call["function"]["name"] for call in calls}


def check_answer(message: dict[str, Any], where: str) -> None:
    """A tool's message says which call it answers."""
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


def short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits, which Mistral's templates insist on."""
    return [with_short_ids(message) for message in messages]


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """One message; the same id becomes the same short one everywhere."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        changed["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in calls]
    return changed


def short_id(call_id: str) -> str:
    """An id that is short enough as it is, another by its hash: "call_x…" → "7Gh2…"."""
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    letters = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ID_CHARACTERS))
        letters.append(ID_CHARACTERS[digit])
    return "".join(letters)
