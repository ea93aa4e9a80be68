"""`/v1/files`: upload, list, retrieve, content, delete.

An upload is written to disk as it arrives, with at most `--max-file` bytes and `--file-quota` per
owner; the other fields of the form are small. The client's file name is stored as text only.
"""

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive

from headway.batches.files.multipart import Begun, Multipart
from headway.batches.files.store import File, Files, new_id, over_quota
from headway.batches.host import BatchHost
from headway.core.errors import RequestError
from headway.edge.database import storage_errors
from headway.edge.errors import json_response
from headway.edge.principal import owner_of

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
MAX_FIELD_BYTES, MAX_FIELDS, MAX_NAME = 1024, 16, 255
MAX_LISTED = 10_000
SHORTEST_S, LONGEST_S = 3600, 2_592_000
WRITE_BYTES = 1 << 20
FORM_BYTES = 64 * 1024
"""Upper bound of a form without its file: other fields, headers and boundaries."""


class Keeper(Protocol):
    """Argument of these routes: the files, and the state with the options."""

    @property
    def files(self) -> Files: ...

    @property
    def state(self) -> BatchHost: ...


async def upload(runner: Keeper, request: Request) -> Response:
    """POST /v1/files"""
    files, options = runner.files, runner.state.options
    owner = owner_of(request.scope)
    form = Multipart(request.headers.get("content-type", ""))
    target = Upload(files, owner, limit=int(options.max_file), quota=int(options.file_quota))
    try:
        await target.count_files()
        await read_form(request.receive, form, target)
        file = target.file(files.now_s)
        await target.finish()
        await files.add(file, owner, target.part, target.quota_bytes)
    finally:
        target.discard()
    return json_response(file.public())


class Upload:
    """One upload in progress: its small fields, and its bytes in a `.part` file.

    Arrived bytes are reserved in the owner's quota until `discard`, so ten concurrent uploads of
    900 kB do not pass a quota of 1 MB. `Files.add` decides finally, in one transaction.
    """

    def __init__(self, files: Files, owner: str, *, limit: int, quota: int) -> None:
        self.id = new_id("file-")
        self.limit_bytes, self.quota_bytes = limit, quota
        self._files, self._owner = files, owner
        self._used = self._reserved = 0
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.size = 0
        self._field: str | None = None
        self._waiting = bytearray()
        self._file: BinaryIO | None = None

    @property
    def part(self) -> Path:
        """Return the path of the arriving bytes; `count_files` opens the folder."""
        return self._files.path(self.id + ".part")

    def begin(self, part: Begun) -> None:
        """Begin a part: the file, or a small field."""
        if part.name == "file":
            if self.filename is not None:
                raise RequestError("Send one file.", param="file", code="invalid_value")
            self._field = None
            self.open(plain_name(part.filename or "upload"))
            return
        if len(self.fields) >= MAX_FIELDS:
            raise RequestError("The form has too many fields.", code="invalid_multipart")
        self._field = part.name
        self.fields[part.name] = b""

    def open(self, filename: str) -> None:
        """Begin the file, whose bytes `take` adds. Raises StorageError."""
        self.filename = filename
        with storage_errors():
            self._file = self.part.open("xb")

    async def take(self, data: bytes) -> None:
        """Add bytes to the part that began last."""
        if self._field is not None:
            self.fields[self._field] += data
            if len(self.fields[self._field]) > MAX_FIELD_BYTES:
                raise RequestError(
                    f"The field {self._field[:80]} is longer than {MAX_FIELD_BYTES} bytes.",
                    param=self._field[:80],
                    code="string_above_max_length",
                )
            return
        self.size += len(data)
        self._reserve(len(data))
        self._waiting += data
        if len(self._waiting) >= WRITE_BYTES:
            await self.flush()
            await self.count_files()

    async def count_files(self) -> None:
        """Read the bytes of the owner's complete files; other uploads may have ended."""
        self._used = await self._files.used_bytes(self._owner)

    def _reserve(self, num_bytes: int) -> None:
        """Count bytes that arrived; RequestError 413 beyond the size of a file or the quota."""
        if self.size > self.limit_bytes:
            raise RequestError(
                f"The file is larger than {self.limit_bytes} bytes; split it.",
                param="file",
                code="request_too_large",
                status=413,
            )
        arriving = self._files.arriving
        if self._used + arriving[self._owner] + num_bytes > self.quota_bytes:
            raise over_quota()
        arriving[self._owner] += num_bytes
        self._reserved += num_bytes

    async def flush(self) -> None:
        """Write the buffered bytes, outside the event loop."""
        data, self._waiting = self._waiting, bytearray()
        target = self._file
        assert target is not None

        def write() -> None:
            with storage_errors():
                target.write(data)

        await asyncio.to_thread(write)

    async def finish(self) -> None:
        """Write the rest and sync it to disk."""
        await self.flush()
        target, self._file = self._file, None
        assert target is not None

        def close() -> None:
            with storage_errors(), target:
                target.flush()
                os.fsync(target.fileno())

        await asyncio.to_thread(close)

    def file(self, now_s: int) -> File:
        """Return the record of the complete upload; raises RequestError for a bad field."""
        purpose = self.fields.get("purpose", b"").decode("utf-8", "replace")
        if self.filename is None:
            raise RequestError(
                "The field file is required.", param="file", code="missing_required_parameter"
            )
        if not purpose:
            raise RequestError(
                "The field purpose is required.", param="purpose", code="missing_required_parameter"
            )
        if purpose not in PURPOSES:
            raise RequestError(
                f"purpose is {purpose[:40]!r}; it must be one of {', '.join(PURPOSES)}.",
                param="purpose",
                code="invalid_value",
            )
        return File(
            id=self.id,
            bytes=self.size,
            created_at=now_s,
            expires_at=expiry(self.fields, now_s),
            filename=self.filename,
            purpose=purpose,
        )

    def discard(self) -> None:
        """Delete the bytes of an unfinished upload and release its quota."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is buffered finds no place, or does
                self._file.close()
            self._file = None
        self.part.unlink(missing_ok=True)
        arriving = self._files.arriving
        arriving[self._owner] -= self._reserved
        self._reserved = 0
        if not arriving[self._owner]:
            del arriving[self._owner]


async def read_form(receive: Receive, form: Multipart, target: Upload) -> None:
    """Pass the form's parts to `target` as they arrive."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("The client left before the file was complete.", code="client_left")
        data = message.get("body", b"")
        size += len(data)
        if size > target.size + len(data) + FORM_BYTES:
            raise RequestError("The form is too large.", code="request_too_large", status=413)
        for event in form.feed(data):
            if isinstance(event, Begun):
                target.begin(event)
            else:
                await target.take(event.data)
        if not message.get("more_body", False):
            break
    if not form.finished:
        raise RequestError("The form ends before its last boundary.", code="invalid_multipart")


def plain_name(name: str) -> str:
    """Return the last part of a path without control characters: "../a\\n.jsonl" → "a.jsonl"."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(c for c in last if c.isprintable())[:MAX_NAME] or "upload"


def expiry(fields: dict[str, bytes], now_s: int) -> int | None:
    """Return when the file expires: `expires_after[anchor]` plus `expires_after[seconds]`."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    text = (seconds or b"").decode("utf-8", "replace")
    value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
    return now_s + lifetime_s((anchor or b"").decode("utf-8", "replace"), value, "expires_after")


def lifetime_s(anchor: Any, seconds: Any, param: str) -> int:
    """Return the validated seconds of an `expires_after` object."""
    if anchor != "created_at":
        raise RequestError(
            f"{param}.anchor must be created_at.", param=f"{param}.anchor", code="invalid_value"
        )
    if type(seconds) is not int or not SHORTEST_S <= seconds <= LONGEST_S:
        raise RequestError(
            f"{param}.seconds must be an integer between {SHORTEST_S} and {LONGEST_S}.",
            param=f"{param}.seconds",
            code="invalid_value",
        )
    return seconds


async def list_files(runner: Keeper, request: Request) -> Response:
    """GET /v1/files?purpose=&after=&limit=&order="""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc.", param="order", code="invalid_value")
    files, more = await runner.files.page(
        owner_of(request.scope),
        purpose=query.get("purpose"),
        after=query.get("after"),
        limit=parse_limit(query.get("limit"), MAX_LISTED, MAX_LISTED),
        newest_first=order == "desc",
    )
    return json_response(page_of([file.public() for file in files], more))


def parse_limit(text: str | None, default: int, most: int) -> int:
    """Return `?limit=` (1 … `most`), or the default."""
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise RequestError(
            f"limit must be an integer between 1 and {most}.", param="limit", code="invalid_value"
        )
    return int(text)


def page_of(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """Return OpenAI's list object."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


async def retrieve(runner: Keeper, request: Request) -> Response:
    """GET /v1/files/{id}"""
    file = await runner.files.get(request.path_params["id"], owner_of(request.scope))
    return json_response(file.public())


async def content(runner: Keeper, request: Request) -> Response:
    """GET /v1/files/{id}/content: the bytes."""
    file = await runner.files.get(request.path_params["id"], owner_of(request.scope))
    scope = request.scope  # always the whole file: a wrong range would be refused in plain text
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"range"]
    name = quote(file.filename, safe="")
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "x-content-type-options": "nosniff",
    }
    return FileResponse(
        runner.files.path(file.id), headers=headers, media_type="application/octet-stream"
    )


async def delete(runner: Keeper, request: Request) -> Response:
    """DELETE /v1/files/{id}"""
    name = request.path_params["id"]
    await runner.files.delete(name, owner_of(request.scope))
    return json_response({"id": name, "object": "file", "deleted": True})


FILE_ROUTES = [
    ("POST", "/v1/files", upload),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/{id}", retrieve),
    ("GET", "/v1/files/{id}/content", content),
    ("DELETE", "/v1/files/{id}", delete),
]
