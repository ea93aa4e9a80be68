"""`/v1/messages/batches`: Anthropic's batches, with the same records and the same runner.

The requests of the body are stored as a file of lines, which `/v1/files` does not show. A fault in
a request fails it alone, when it runs; a bad `custom_id` fails the whole batch.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headway.batches.files.routes import Upload, parse_limit
from headway.batches.files.store import MESSAGE_PURPOSE, File, new_id, no_such
from headway.batches.lines import MESSAGES
from headway.batches.routes import DEFAULT_LISTED, MAX_UNFINISHED, WINDOWS_S
from headway.batches.runner import Runner
from headway.batches.store import MESSAGE_PREFIX, UNFINISHED, BatchCounts, BatchPrice, BatchRecord
from headway.core.errors import RequestError, StorageError
from headway.core.regular_file import open_regular
from headway.edge import body as bodies
from headway.edge.database import storage_errors
from headway.edge.errors import json_response
from headway.edge.principal import owner_of, principal_of, turn_of

MAX_REQUESTS, MAX_PAGE = 100_000, 1000
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
READ_BYTES = 1 << 20
RESULTS_TYPE = "application/x-jsonl"


class BatchRequest(msgspec.Struct):
    """One of `requests`: `params` is a body of /v1/messages."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchBody(msgspec.Struct):
    """POST /v1/messages/batches."""

    requests: list[BatchRequest]


async def create(runner: Runner, request: Request) -> Response:
    """POST /v1/messages/batches: create a batch, which is in progress."""
    options = runner.state.options
    raw, _ = await bodies.read_object(
        request.receive,
        options.max_body,
        MessageBatchBody,
        pool=runner.state.pool,
        user=turn_of(request.scope),
    )
    requests = bodies.typed(raw, MessageBatchBody).requests
    check(requests)
    principal, now_s = principal_of(request.scope), runner.files.now_s
    file = await keep_requests(runner, requests, principal.name)
    batch = BatchRecord(
        id=new_id(MESSAGE_PREFIX),
        endpoint=MESSAGES,
        input_file_id=file.id,
        created_at=now_s,
        expires_at=now_s + WINDOWS_S["24h"],
        request_counts=BatchCounts(total=len(requests)),
        price=BatchPrice(share=runner.state.batch_price, cached=options.cached_price),
        principal=principal,
    )
    try:
        await runner.batches.add(batch, MAX_UNFINISHED)
    except RequestError:
        await runner.files.remove([file.id])
        raise
    with contextlib.suppress(StorageError):  # it is kept, and begins when the disk has room
        batch = await runner.batches.begin(batch.id, await runner.read_lines(batch))
    runner.take(batch.id)
    return json_response(public(batch, request))


def check(requests: list[BatchRequest]) -> None:
    """Raise RequestError for a fault that types do not exclude."""
    if not 0 < len(requests) <= MAX_REQUESTS:
        raise RequestError(
            f"requests has {len(requests)} entries; a batch has 1 to {MAX_REQUESTS}.",
            param="requests",
            code="invalid_value",
        )
    first_indexes: dict[str, int] = {}
    for index, each in enumerate(requests):
        check_id(each.custom_id, index, first_indexes)


def check_id(custom_id: str, index: int, first_indexes: dict[str, int]) -> None:
    """Raise RequestError for a `custom_id` of another form, or one that occurred before."""
    where = f"requests.{index}.custom_id"
    if not CUSTOM_ID.fullmatch(custom_id):
        raise RequestError(
            f"{where} is {custom_id[:80]!r}; it must be 1 to 64 of a-z, A-Z, 0-9, _, -.",
            param=where,
            code="invalid_custom_id",
        )
    first = first_indexes.setdefault(custom_id, index)
    if first != index:
        raise RequestError(
            f"{where} is {custom_id!r}, and so is requests.{first}.custom_id.",
            param=where,
            code="duplicate_custom_id",
        )


async def keep_requests(runner: Runner, requests: list[BatchRequest], owner: str) -> File:
    """Write the requests as a file of lines within the owner's quota.

    The quota is checked before each write; raises RequestError 413.
    """
    files, options = runner.files, runner.state.options
    target = Upload(files, owner, limit=int(options.max_file), quota=int(options.file_quota))
    try:
        await target.count_files()
        target.open("requests.jsonl")
        for each in requests:
            entry = {"custom_id": each.custom_id, "method": "POST", "url": MESSAGES}
            await target.take(msgspec.json.encode({**entry, "body": each.params}) + b"\n")
        await target.finish()
        file = File(
            id=target.id,
            bytes=target.size,
            created_at=files.now_s,
            filename="requests.jsonl",
            purpose=MESSAGE_PURPOSE,
        )
        await files.add(file, owner, target.part, target.quota_bytes)
    finally:
        target.discard()
    return file


# ── as a client sees it ─────────────────────────────────────────────────────────────────────


def public(batch: BatchRecord, request: Request) -> dict[str, Any]:
    """Return Anthropic's message batch; its requests count as `processing` until it has ended."""
    ended_at = batch.completed_at or batch.cancelled_at
    if batch.status == "expired":
        ended_at = batch.expired_at
    is_over = batch.status not in UNFINISHED
    cancelling = batch.cancelling_at is not None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_over else "canceling" if cancelling else "in_progress",
        "request_counts": counts_of(batch, is_over),
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "ended_at": rfc3339(ended_at) if is_over else None,
        "cancel_initiated_at": rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": results_url(batch.id, request) if is_over else None,
    }


def counts_of(batch: BatchRecord, is_over: bool) -> dict[str, int]:
    """Return the number of requests by outcome; the sum is always their total."""
    counts = batch.request_counts
    rest = counts.total - counts.completed - counts.failed
    ends = {"succeeded": counts.completed, "errored": counts.failed, "canceled": 0, "expired": 0}
    if not is_over:
        return {"processing": counts.total} | dict.fromkeys(ends, 0)
    ends["expired" if batch.status == "expired" else "canceled"] = rest
    return {"processing": 0, **ends}


def rfc3339(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def results_url(batch_id: str, request: Request) -> str:
    """Return the URL of the results, under the address that the client used."""
    url = request.url
    if request.headers.get("x-forwarded-proto") == "https":  # of a proxy that ends TLS
        url = url.replace(scheme="https")
    root = request.scope.get("root", "")  # the prefix that `RootPath` removed
    return f"{url.scheme}://{url.netloc}{root}{MESSAGES}/batches/{batch_id}/results"


async def retrieve(runner: Runner, request: Request) -> Response:
    """GET /v1/messages/batches/{id}"""
    return json_response(public(await batch_of(runner, request), request))


async def batch_of(runner: Runner, request: Request) -> BatchRecord:
    """Return the batch of the path; RequestError 404 if it is missing or of another key."""
    batch_id, owner = request.path_params["id"], owner_of(request.scope)
    return await runner.batches.get(batch_id, owner, MESSAGE_PREFIX)


async def list_page(runner: Runner, request: Request) -> Response:
    """GET /v1/messages/batches?limit=&after_id=&before_id=, the newest first."""
    query = request.query_params
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise RequestError(
            "after_id and before_id are both given; leave one out.",
            param="before_id",
            code="invalid_value",
        )
    batches, more = await runner.batches.page(
        owner_of(request.scope),
        after,
        parse_limit(query.get("limit"), DEFAULT_LISTED, MAX_PAGE),
        before=before,
        prefix=MESSAGE_PREFIX,
    )
    return json_response(
        {
            "data": [public(batch, request) for batch in batches],
            "has_more": more,
            "first_id": batches[0].id if batches else None,
            "last_id": batches[-1].id if batches else None,
        }
    )


async def cancel(runner: Runner, request: Request) -> Response:
    """POST /v1/messages/batches/{id}/cancel"""
    batch_id, owner = request.path_params["id"], owner_of(request.scope)
    batch = await runner.batches.cancel(batch_id, owner, MESSAGE_PREFIX)
    runner.cancel(batch.id)
    return json_response(public(batch, request))


async def results(runner: Runner, request: Request) -> Response:
    """GET /v1/messages/batches/{id}/results: one line per request, in any order."""
    batch = await batch_of(runner, request)
    if batch.status in UNFINISHED:
        raise RequestError(
            "The batch has no results until its processing_status is ended.",
            param="batch_id",
            code="batch_not_ended",
        )
    opened = await asyncio.to_thread(open_results, runner, batch)
    return StreamingResponse(contents(opened), media_type=RESULTS_TYPE)


def open_results(runner: Runner, batch: BatchRecord) -> list[BinaryIO]:
    """Open the result files of an ended batch: a file deleted later can be read to its end.

    Raises RequestError 404 if it is deleted already.
    """
    names = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
    with contextlib.ExitStack() as opened, storage_errors():
        try:
            files = [opened.enter_context(open_regular(runner.files.path(name))) for name in names]
        except FileNotFoundError:
            raise no_such("batch", batch.id) from None
        opened.pop_all()
    return list(files)


def contents(files: Sequence[BinaryIO]) -> Iterator[bytes]:
    """Yield the bytes of open files, one after the other, then close them."""
    with contextlib.ExitStack() as opened:
        for file in files:
            opened.enter_context(file)
        for file in files:
            while data := file.read(READ_BYTES):
                yield data


async def delete(runner: Runner, request: Request) -> Response:
    """DELETE /v1/messages/batches/{id}: the record, its requests and its results."""
    batch = await batch_of(runner, request)
    await runner.batches.delete(batch.id)
    names = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
    await runner.files.remove([name for name in names if name is not None])
    return json_response({"id": batch.id, "type": "message_batch_deleted"})


MESSAGE_BATCH_ROUTES = [
    ("POST", "/v1/messages/batches", create),
    ("GET", "/v1/messages/batches", list_page),
    ("GET", "/v1/messages/batches/{id}", retrieve),
    ("DELETE", "/v1/messages/batches/{id}", delete),
    ("POST", "/v1/messages/batches/{id}/cancel", cancel),
    ("GET", "/v1/messages/batches/{id}/results", results),
]
