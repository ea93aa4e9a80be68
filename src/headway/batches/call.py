"""In-process request: call an endpoint of this server as an HTTP request would.

A line of a batch gets exactly the answer of the same body over HTTP, errors included. There is no
socket; cancelling the call frees its KV blocks.
"""

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from headway.core.errors import RequestError, ServerFaultError
from headway.core.principal import ANONYMOUS
from headway.core.request_source import RequestSource, client_id_of
from headway.core.service import BATCH_CLASS
from headway.edge.errors import error_body
from headway.edge.json_limits import MALFORMED, malformed_error
from headway.edge.keys import Caller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """Status and body of an answer, and the id of the request.

    `retry_after_s` is the time to wait after a refusal for a limit.
    """

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    reason: str | None = None
    """Code of an error whose body has none, as Anthropic's."""

    @property
    def code(self) -> str | None:
        """Return the code of an error."""
        if self.status == 200 or self.reason is not None:
            return self.reason
        code: str | None = msgspec.json.decode(self.body).get("error", {}).get("code")
        return code


async def call(
    app: ASGIApp, path: str, body: bytes, caller: Caller, custom_id: str = ""
) -> LineAnswer:
    """Return the answer of the endpoint `app`, served at `path`, to `caller`.

    In the log the request has the `custom_id` of its line. The caller must count the request for
    its key (`Meter.enter`).
    """
    request_id = uuid.uuid4().hex
    retry_after_s = None
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # there is no client that could disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    source = RequestSource(
        request_id=request_id,
        path=path,
        key=None if caller.principal.name == ANONYMOUS else caller.principal.name,
        client_request_id=client_id_of(custom_id),
    )
    scope = request_scope(path, source, caller)
    try:
        await app(scope, receive, send)
    except RequestError as error:
        status, parts = error.status, [msgspec.json.encode(error_body(error))]
        retry_after_s = error.retry_after_s
    except Exception:
        log.exception("request %s failed", request_id)
        status, parts = 500, [msgspec.json.encode(error_body(ServerFaultError()))]
    body = b"".join(parts)
    return LineAnswer(
        status=status,
        body=body,
        request_id=request_id,
        retry_after_s=retry_after_s,
        reason=scope.get("error_code"),
    )


def request_scope(path: str, source: RequestSource, caller: Caller) -> dict[str, Any]:
    """Return the scope that `AuthMiddleware` passes on for an HTTP request."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "request_id": source.request_id,
        "source": source,
        "caller": caller,
    }


NO_TIERS = (b"null", b'"auto"', b'"default"', b'"standard_only"')
"""Values of `service_tier` that name no class, the last one Anthropic's."""


class ServiceFields(msgspec.Struct):
    """Fields of a line's body that concern its service; all others are skipped."""

    stream: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"null")
    service_class: msgspec.Raw = msgspec.Raw(b"null")
    service_tier: msgspec.Raw = msgspec.Raw(b"null")


def batch_body(body: bytes) -> bytes:
    """Return a line's body, in the class of batches unless it names another; RequestError if bad.

    Whether the key may use that class is checked by the endpoint. The tiers in `NO_TIERS` name no
    class. Streams cannot be written to a file, and background answers would never be fetched.
    """
    try:
        head = msgspec.json.decode(body, type=ServiceFields)
    except MALFORMED as error:
        raise malformed_error(error) from None
    for name in ("stream", "background"):
        if bytes(getattr(head, name)) == b"true":
            raise RequestError(
                f"A line of a batch is answered as a whole; leave {name} out.",
                param=name,
                code="unsupported_value",
            )
    no_tier = bytes(head.service_tier) in NO_TIERS
    if bytes(head.service_class) == b"null" and no_tier:  # the last of two fields of a name holds
        rest = body.rstrip()[:-1].rstrip()
        comma = b"" if rest.endswith(b"{") else b","
        return rest + comma + b'"service_class":' + msgspec.json.encode(BATCH_CLASS) + b"}"
    return body
