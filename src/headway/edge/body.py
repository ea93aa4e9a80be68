"""Parser of request bodies: from bytes to a typed body, with errors that name the field.

Bodies are parsed by msgspec, which refuses NaN, 1e400, lone surrogates and unbounded nesting. A
body with more values than `json_limits` allows is refused before that. A long body waits for its
turn (`body_turns.py`) and is parsed in a thread. A field of the wrong type gives `invalid_type`
with its path.
"""

import re
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from headway.core.errors import RequestError
from headway.edge.body_turns import BodyTurns
from headway.edge.json_limits import MALFORMED, check_counts, malformed_error, not_an_object_error
from headway.edge.lanes import LONG_BYTES, BodyPool

Body = TypeVar("Body", bound=msgspec.Struct)
SMALL_BYTES = 4096
PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


async def read_object(
    receive: Receive, limit_bytes: int, kind: type[msgspec.Struct], *, pool: BodyPool, user: str
) -> tuple[dict[str, Any], int]:
    """Read a JSON object for a `kind`; returns it and its size in bytes. Raises RequestError."""
    pieces = await read_pieces(receive, limit_bytes, pool.turns, user)
    num_bytes = sum(map(len, pieces))
    if num_bytes < LONG_BYTES:
        return parse_object(b"".join(pieces)), num_bytes

    def parse() -> dict[str, Any]:
        data = b"".join(pieces)
        pieces.clear()
        check_counts(data, kind)
        return parse_object(data)

    return await pool.parse(user, receive, parse), num_bytes


async def read_pieces(
    receive: Receive, limit_bytes: int, turns: BodyTurns, user: str
) -> list[bytes | bytearray]:
    """Read the body in pieces; RequestError 413 as soon as it is longer than `limit_bytes`.

    Bytes after the first `LONG_BYTES` are read in turns between users, oldest body first.
    Consecutive pieces below `SMALL_BYTES` are joined: as objects they would take 50 bytes each.
    """
    pieces: list[bytes | bytearray] = []
    num_bytes, number = 0, None
    while True:
        if num_bytes >= LONG_BYTES:
            number = turns.number() if number is None else number
            await turns.wait(user, number)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("The client left before the body was complete.", code="client_left")
        data = message.get("body", b"")
        num_bytes += len(data)
        if num_bytes > limit_bytes:
            raise RequestError(
                f"The body is larger than {limit_bytes} bytes.",
                code="request_too_large",
                status=413,
            )
        if len(data) >= SMALL_BYTES:
            pieces.append(data)
        elif pieces and isinstance(pieces[-1], bytearray):
            pieces[-1] += data
        else:
            pieces.append(bytearray(data))
        if not message.get("more_body", False):
            return pieces


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `data`."""
    try:
        value = msgspec.json.decode(data)
    except MALFORMED as error:
        raise malformed_error(error) from error
    if not isinstance(value, dict):
        raise not_an_object_error()
    return value


def typed(raw: dict[str, Any], kind: type[Body]) -> Body:
    """Convert `raw` to a `kind`; RequestError names the field that does not fit."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error


def explain(text: str) -> RequestError:
    """Turn msgspec's "Expected `float | null`, got `str` - at `$.top_p`" into an API error."""
    match = PLACE.match(text)
    assert match is not None
    what, where = match["what"], match["where"] or None
    unknown = UNKNOWN.match(what)
    if unknown:
        name = f"{where}.{unknown['name']}" if where else unknown["name"]
        return RequestError(f"The field {name} is unknown.", param=name, code="unknown_parameter")
    missing = MISSING.match(what)
    if missing:
        name = f"{where}.{missing['name']}" if where else missing["name"]
        return RequestError(
            f"The field {name} is required.", param=name, code="missing_required_parameter"
        )
    words = re.sub(r"`([^`]*)`", lambda m: plain_types(m[1]), what)
    return RequestError(
        f"{where}: {words[:1].lower()}{words[1:]}." if where else f"{words}.",
        param=where,
        code="invalid_type",
    )


def plain_types(names: str) -> str:
    """Translate type names: "float | null" → "a number or null"."""
    return " or ".join(TYPE_NAMES.get(name, name) for name in names.split(" | "))


def printable(names: list[str], limit: int = 200) -> str:
    """Join names from a client for a header or log: ["a b", "é", ""] → "a?b, ?, ?"."""
    shown = [name[:limit] for name in names[:limit]]
    plain = ["".join(c if "!" <= c <= "~" else "?" for c in name) for name in shown]
    return ", ".join(name or "?" for name in plain)[:limit].rstrip()
