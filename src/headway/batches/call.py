"""One request from inside: an endpoint of our own, called as a client's request would call it.

So a line of a batch is answered exactly as the same body over HTTP, refusals included, whatever
the endpoint grows into. Nothing goes over a socket; cancelling the call frees its blocks.
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
from headway.edge.json_limits import MALFORMED, malformed
from headway.edge.keys import Caller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status and body of an answer, and the id the request had.

    `retry_after_s` is when to come back, of one that was refused for a limit.
    """

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    reason: str | None = None
    """The code of an error whose body has none, as Anthropic's."""

    @property
    def code(self) -> str | None:
        """The code of an error."""
        if self.status == 200 or self.reason is not None:
            return self.reason
        code: str | None = msgspec.json.decode(self.body).get("error", {}).get("code")
        return code


async def call(app: ASGIApp, path: str, body: bytes, caller: Caller, custom_id: str = "") -> Answer:
    """The answer of the endpoint `app`, which is served at `path`, to `caller`.

    In the log the request has the `custom_id` of its line.

    That the request counts among those of its key (`Meter.enter`) is the callers' business.
    """
    request_id = uuid.uuid4().hex
    retry_after_s = None
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # nobody leaves
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
    return Answer(
        status=status,
        body=body,
        request_id=request_id,
        retry_after_s=retry_after_s,
        reason=scope.get("error_code"),
    )


def request_scope(path: str, source: RequestSource, caller: Caller) -> dict[str, Any]:
    """What `AuthMiddleware` hands on of a request over HTTP."""
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


class Head(msgspec.Struct):
    """What a line's body says of itself; whatever else is in it is passed over, not made."""

    stream: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"null")
    service_class: msgspec.Raw = msgspec.Raw(b"null")
    service_tier: msgspec.Raw = msgspec.Raw(b"null")


def batch_body(body: bytes) -> bytes:
    """A line's body, in the class of batches unless it names another; raises RequestError.

    Whether its key may use that one is seen where a request's class is. Of the tiers those of
    `NO_TIERS` name none. A stream has no place in a file, and
    nobody would fetch what runs in the background.
    """
    try:
        head = msgspec.json.decode(body, type=Head)
    except MALFORMED as error:
        raise malformed(error) from None
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
