"""One request from inside: an endpoint of our own, called as a client's request would call it.

So a line of a batch is answered exactly as the same body over HTTP, refusals included, whatever
the endpoint grows into. Nothing goes over a socket; cancelling the call frees its blocks.
"""

import asyncio
import logging
import uuid
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from headway.core.errors import RequestError, ServerFaultError
from headway.core.principal import Principal
from headway.server.errors import error_body
from headway.server.keys import anybody

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status and body of an answer, and the id the request had."""

    status: int
    body: bytes
    request_id: str

    @property
    def code(self) -> str | None:
        """The code of an error."""
        if self.status == 200:
            return None
        code: str | None = msgspec.json.decode(self.body).get("error", {}).get("code")
        return code


async def call(app: ASGIApp, path: str, body: bytes, principal: Principal) -> Answer:
    """The answer of the endpoint `app`, which is served at `path`."""
    request_id = uuid.uuid4().hex
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

    try:
        await app(request_scope(path, request_id, principal), receive, send)
    except RequestError as error:
        status, parts = error.status, [msgspec.json.encode(error_body(error))]
    except Exception:
        log.exception("request %s failed", request_id)
        status, parts = 500, [msgspec.json.encode(error_body(ServerFaultError()))]
    return Answer(status=status, body=b"".join(parts), request_id=request_id)


def request_scope(path: str, request_id: str, principal: Principal) -> dict[str, Any]:
    """What the doors would hand on."""
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
        "request_id": request_id,
        "caller": replace(anybody(), principal=principal, admin=False),
    }


def batch_body(body: bytes, service_class: str) -> bytes:
    """A line's body, in the class of batches unless it names one; raises RequestError.

    A stream has no place in a file.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RequestError(
            f"The body is not valid JSON: {str(error)[:200]}.", code="invalid_json"
        ) from None
    if content.get("stream"):
        raise RequestError(
            "A line of a batch cannot stream; leave stream out.",
            param="stream",
            code="unsupported_value",
        )
    if "service_class" not in content and "service_tier" not in content:
        content["service_class"] = service_class
    return msgspec.json.encode(content)
