"""`/v1/batches`: create, list, retrieve, cancel."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.batches.files.routes import lifetime_s, page_of, parse_limit
from headway.batches.files.store import new_id
from headway.batches.lines import ENDPOINTS
from headway.batches.runner import Runner
from headway.batches.store import BatchPrice, BatchRecord
from headway.core.errors import RequestError
from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.principal import owner_of, principal_of, turn_of

WINDOWS_S = {"24h": 24 * 3600}
MAX_UNFINISHED = 100
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
MAX_LISTED, DEFAULT_LISTED = 100, 20


class ExpiresAfter(msgspec.Struct):
    """`output_expires_after`."""

    anchor: str
    seconds: int


class CreateBody(msgspec.Struct):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


async def create(runner: Runner, request: Request) -> Response:
    """POST /v1/batches: create a batch, which begins validating."""
    options = runner.state.options
    raw, _ = await bodies.read_object(
        request.receive,
        options.max_body,
        CreateBody,
        pool=runner.state.pool,
        user=turn_of(request.scope),
    )
    body = bodies.typed(raw, CreateBody)
    check(runner, body)
    principal = principal_of(request.scope)
    file = await runner.files.get(body.input_file_id, principal.name)
    if file.purpose != "batch":
        raise RequestError(
            f"The purpose of this file is {file.purpose}; upload it with batch.",
            param="input_file_id",
            code="invalid_file_purpose",
        )
    now_s = runner.files.now_s
    batch = BatchRecord(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now_s,
        expires_at=now_s + WINDOWS_S[body.completion_window],
        metadata=body.metadata,
        price=BatchPrice(share=runner.state.batch_price, cached=options.cached_price),
        principal=principal,
        output_lifetime_s=output_lifetime_s(body.output_expires_after),
    )
    await runner.batches.add(batch, MAX_UNFINISHED)
    runner.take(batch.id)
    return json_response(batch.public())


def output_lifetime_s(after: ExpiresAfter | None) -> int | None:
    """Return the lifetime of the output files in seconds, None for unlimited."""
    if after is None:
        return None
    return lifetime_s(after.anchor, after.seconds, "output_expires_after")


def check(runner: Runner, body: CreateBody) -> None:
    """Raise RequestError for a fault that types do not exclude."""
    served = [path for path in ENDPOINTS if path in runner.endpoints]
    if body.endpoint not in served:
        raise RequestError(
            f"endpoint is {body.endpoint[:80]!r}; it must be one of {', '.join(served)}.",
            param="endpoint",
            code="invalid_value",
        )
    if body.completion_window not in WINDOWS_S:
        raise RequestError(
            "completion_window must be 24h.", param="completion_window", code="invalid_value"
        )
    metadata: dict[str, Any] = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()
    ):
        raise RequestError(
            f"metadata has at most {MAX_METADATA} keys of {MAX_KEY} characters, with values of "
            f"{MAX_VALUE}.",
            param="metadata",
            code="invalid_value",
        )


async def list_batches(runner: Runner, request: Request) -> Response:
    """GET /v1/batches?after=&limit="""
    query = request.query_params
    limit = parse_limit(query.get("limit"), DEFAULT_LISTED, MAX_LISTED)
    batches, more = await runner.batches.page(owner_of(request.scope), query.get("after"), limit)
    return json_response(page_of([batch.public() for batch in batches], more))


async def retrieve(runner: Runner, request: Request) -> Response:
    """GET /v1/batches/{id}"""
    batch = await runner.batches.get(request.path_params["id"], owner_of(request.scope))
    return json_response(batch.public())


async def cancel(runner: Runner, request: Request) -> Response:
    """POST /v1/batches/{id}/cancel"""
    owner = owner_of(request.scope)
    batch = await runner.batches.cancel(request.path_params["id"], owner)
    runner.cancel(batch.id)
    return json_response(batch.public())


BATCH_ROUTES = [
    ("POST", "/v1/batches", create),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/{id}", retrieve),
    ("POST", "/v1/batches/{id}/cancel", cancel),
]
