"""Limit of the number of values in a body, checked before parsing.

Ten megabytes of `[[]]` are two million lists, and creating them blocks the event loop. The JSON
text is counted in slices without its strings; msgspec finds the field at fault, because it can skip
values without creating them:

    {"a": [1, "x,y"], "b": {}}     5: each opening bracket and each comma counts

More token ids are allowed, because numbers are cheap; a list or a text among them is not.
"""

import re
from functools import cache
from typing import Any

import msgspec

from headway.core.errors import RequestError

MAX_VALUES = 100_000
MAX_IDS = 2_000_000
IDS = ("prompt", "tokens", "allowed_token_ids", "stop_token_ids")
"""Fields of token ids: plain numbers, of which a long prompt has many."""
SLICE_BYTES = 64 * 1024
STRING = re.compile(rb'"[^"]*"')
TEXT = b"T"
"""Replacement of a string in a slice; JSON has no such letter outside of strings."""
VALUES, NO_NUMBERS = (b",", b"[", b"{"), (TEXT, b"[", b"{")
"""Characters that mark values, and those that mark values other than plain numbers."""


def check_counts(data: bytes, kind: type[msgspec.Struct]) -> None:
    """Raise RequestError, with the field's name, if a body for `kind` has too many values."""
    if num_values(data, MAX_VALUES) <= MAX_VALUES:
        return
    try:
        fields = msgspec.json.decode(data, type=raw_kind(kind))
    except msgspec.ValidationError:
        raise not_an_object_error() from None
    except MALFORMED as error:
        raise malformed_error(error) from error
    known, costly = 0, {}  # values of known fields; those among them that are no token ids
    for name in kind.__struct_fields__:
        raw = getattr(fields, name)
        if raw is msgspec.UNSET:
            continue
        most = MAX_IDS if name in IDS else MAX_VALUES
        count = num_values(raw, most)
        if count > most:
            raise too_many_values_error(name, f"{name} holds", most)
        known += count
        costly[name] = num_marks(raw, MAX_VALUES, NO_NUMBERS) if name in IDS else count
    others = num_values(data, known + MAX_VALUES) - known
    if others > MAX_VALUES:
        raise too_many_values_error(None, "The unknown fields of the body hold", MAX_VALUES)
    if others + sum(costly.values()) > MAX_VALUES:
        largest = max(costly, key=costly.__getitem__)
        raise too_many_values_error(
            largest, f"Apart from token ids the body, most of all {largest}, holds", MAX_VALUES
        )


MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError)


def malformed_error(error: Exception) -> RequestError:
    return RequestError(f"The body is not valid JSON: {str(error)[:200]}.", code="invalid_json")


def not_an_object_error() -> RequestError:
    return RequestError("The body must be a JSON object.", code="invalid_json")


def too_many_values_error(name: str | None, what: str, most: int) -> RequestError:
    return RequestError(
        f"{what} more than {most:,} values. Send fewer.", param=name, code="too_many_values"
    )


@cache
def raw_kind(kind: type[msgspec.Struct]) -> Any:
    """Return a struct with the fields of `kind`, each of which stays unparsed."""
    raw = msgspec.Raw | msgspec.UnsetType
    fields = [(name, raw, msgspec.UNSET) for name in kind.__struct_fields__]
    return msgspec.defstruct(f"Raw{kind.__name__}", fields)


def num_values(json: bytes | msgspec.Raw, most: int) -> int:
    """Return the number of values in JSON by commas and opening brackets: `[1, "a,b", {}]` → 4.

    Above `most` the count stops and is approximate.
    """
    return num_marks(json, most, VALUES)


def num_marks(json: bytes | msgspec.Raw, most: int, marks: tuple[bytes, ...]) -> int:
    """Return the number of `marks` outside of strings; above `most` it is approximate."""
    data = memoryview(json)
    total = at = 0
    in_string = False
    while at < len(data) and total <= most:
        piece = bytes(data[at : at + SLICE_BYTES])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # never split an escape
            piece = bytes(data[at : at + SLICE_BYTES + 1])
        at += len(piece)
        if in_string and b'"' not in piece:
            continue
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        if in_string:
            _, quote, piece = piece.partition(b'"')
            if not quote:
                continue
        piece, quote, _ = STRING.sub(TEXT, piece).partition(b'"')
        in_string = bool(quote)
        total += sum(map(piece.count, marks))
    return total
