"""Lines of a batch: validated before any of them runs, each fault with its line number.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", …}}

The file is read line by line, at most `--max-body` bytes each. The endpoint checks the body of a
line when it runs: a bad temperature fails that line alone, a line that is no request fails the
batch.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from headway.core.errors import RequestError
from headway.core.regular_file import open_regular

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
MAX_FAULTS = 1000
MESSAGES = "/v1/messages"
"""Endpoint of the requests of a message batch."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints of the lines of a batch; the others of OpenAI's batches are not served."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch and the place of its bytes in the file; `number` counts from 1."""

    number: int
    custom_id: str
    start: int
    size: int
    tries: int = 0


class Fault(msgspec.Struct, kw_only=True):
    """Reason why a line is no request; an entry of OpenAI's `errors.data`."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


@dataclass(slots=True)
class Checked:
    """Result of the validation of a file: its lines, or its faults."""

    lines: list[BatchLine] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    model: str | None = None

    def wrong(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        """Note a fault; only the first thousand are kept."""
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(code=code, line=line, message=message, param=param))


class ModelField(msgspec.Struct):
    """The model of a line's body; None for the only one served."""

    model: str | None = None


class Entry(msgspec.Struct):
    """A line, its body as it stands."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


decode_entry = msgspec.json.Decoder(Entry).decode
decode_head = msgspec.json.Decoder(ModelField).decode


def check_file(
    path: Path,
    *,
    endpoints: Collection[str],
    models: Sequence[str],
    unnamed: str | None,
    max_line_bytes: int,
    max_lines: int = MAX_LINES,
) -> Checked:
    """Return the lines of a file, or its faults. Raises OSError.

    `models` are the served names; `unnamed` is the model of a line that names none, None if it must
    name one.
    """
    checked = Checked()
    first_lines: dict[str, int] = {}
    with open_regular(path) as file:
        for number, start, data in numbered(file, max_line_bytes):
            if len(checked.lines) == max_lines:
                checked.wrong(number, "too_many_lines", f"A batch has at most {max_lines} lines.")
                break
            place = number, start, data
            line = check_line(checked, place, endpoints, models, unnamed, max_line_bytes)
            if line is None:
                continue
            first = first_lines.setdefault(line.custom_id, number)
            if first != number:
                checked.wrong(
                    number,
                    "duplicate_custom_id",
                    f"Line {first} has the same custom_id.",
                    "custom_id",
                )
            checked.lines.append(line)
    if not checked.lines and not checked.faults:
        checked.wrong(None, "empty_file", "The file has no lines.")
    return checked


def check_messages(path: Path, *, models: Sequence[str], unnamed: str | None) -> Checked:
    """Return the lines of the file of a message batch. Raises OSError.

    The batch waits for the first served model that one of its requests names. A fault of a request
    is reported when it runs.
    """
    checked, start = Checked(), 0
    with open_regular(path) as file:
        for number, data in enumerate(file, 1):
            entry = decode_entry(data)
            checked.lines.append(BatchLine(number, entry.custom_id, start, len(data)))
            start += len(data)
            if checked.model is None:
                with contextlib.suppress(msgspec.ValidationError):
                    named = decode_head(entry.body).model or unnamed
                    checked.model = named if named in models else None
    checked.model = checked.model or next(iter(models), None)
    return checked


def numbered(file: BinaryIO, limit_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset, bytes) of each line that is not blank, cut after `limit_bytes` + 1."""
    number = start = 0
    while data := file.readline(limit_bytes + 1):
        number += 1
        size = len(data)
        part = data
        while len(part) > limit_bytes and not part.endswith(b"\n"):  # skip the rest of a long line
            part = file.readline(limit_bytes + 1)
            size += len(part)
        if data.strip():
            yield number, start, data
        start += size


def check_line(
    checked: Checked,
    place: tuple[int, int, bytes],
    endpoints: Collection[str],
    models: Sequence[str],
    unnamed: str | None,
    max_line_bytes: int,
) -> BatchLine | None:
    """Return the line at (number, offset, bytes), or None after noting its fault."""
    number, start, data = place
    if len(data) > max_line_bytes:
        checked.wrong(number, "line_too_long", f"The line has more than {max_line_bytes} bytes.")
        return None
    try:
        entry = decode_entry(data)
        head = decode_head(entry.body)
    except msgspec.ValidationError as error:
        checked.wrong(number, "invalid_request", f"{str(error)[:200]}.")
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        checked.wrong(number, "invalid_json_line", f"The line is not JSON: {str(error)[:200]}.")
        return None
    named = unnamed if head.model is None else head.model
    if named is None:
        message = f"The field model is required; there is {', '.join(models)}."
        checked.wrong(number, "missing_required_parameter", message, "body.model")
        return None
    for code, message, param in faults_of(entry, named, checked.model, endpoints, models):
        checked.wrong(number, code, message, param)
        return None
    checked.model = named
    return BatchLine(number, entry.custom_id, start, len(data))


def faults_of(
    entry: Entry, named: str, model: str | None, endpoints: Collection[str], models: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (code, message, param) of each fault of a well-formed line."""
    if not 0 < len(entry.custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters."
        yield "invalid_custom_id", message, "custom_id"
    if entry.method != "POST":
        yield "invalid_method", f"method is {entry.method[:20]!r}; it must be POST.", "method"
    if entry.url not in endpoints:
        allowed = " or ".join(sorted(endpoints))
        yield "invalid_url", f"url is {entry.url[:80]!r}; it must be {allowed}.", "url"
    if named not in models:
        there = ", ".join(models)
        message = f"The model {named[:80]!r} does not exist; there is {there}."
        yield "model_not_found", message, "body.model"
    if model not in (None, named):
        message = f"The model {named[:80]!r} is not that of the lines before, {model!r}."
        yield "mismatched_model", message, "body.model"


def read_body(path: Path, line: BatchLine) -> tuple[str, bytes]:
    """Return (url, body) of a checked line; RequestError if the file has changed since."""
    with open_regular(path) as file:
        file.seek(line.start)
        data = file.read(line.size)
    changed = RequestError("The line has changed since it was checked.", code="file_changed")
    try:
        entry = decode_entry(data)
    except msgspec.DecodeError:
        raise changed from None
    if entry.custom_id != line.custom_id:
        raise changed
    return entry.url, bytes(entry.body)
