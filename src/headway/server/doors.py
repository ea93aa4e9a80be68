"""Who may come in: keys, denied by default, and limits on what a request may bring.

A pure ASGI layer around all routes. Without keys everybody on the address may ask; with keys every
path wants one, whether a route exists there or not, but `/health`, `/ready` and the page's files.
"""

import hashlib
import hmac
import logging
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.core.errors import RequestError, ServerFaultError
from headway.core.request import Principal
from headway.server import page
from headway.server.errors import error_response

log = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/health", "/ready"}) | page.PATHS


class Doors:
    """Checks the key, gives each request an id, and turns RequestErrors into answers."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self._app = app
        self._digests = [digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        request_id = uuid.uuid4().hex
        scope["request_id"] = request_id
        extra = [(b"x-request-id", request_id.encode())]
        client_id = header(scope, b"x-request-id")
        if client_id and len(client_id) <= 200 and client_id.isascii() and client_id.isprintable():
            extra.append((b"x-client-request-id", client_id.encode()))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        scope["app"] = self  # then Starlette raises its 405 instead of answering in plain text
        try:
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except (RequestError, HTTPException) as error:
            refusal = as_request_error(error, scope)
        except Exception:
            log.exception("request %s failed", request_id)
            refusal = ServerFaultError()
        else:
            return
        if not started:
            await error_response(refusal)(scope, receive, send_with_id)

    def _check_key(self, scope: Scope) -> None:
        """Raise RequestError 401 unless the path is public or the key is known."""
        if not self._digests or scope["path"] in PUBLIC_PATHS:
            return
        given = header(scope, b"authorization") or ""
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer":
            key = header(scope, b"x-api-key") or ""
        known = [hmac.compare_digest(digest(key.strip()), mine) for mine in self._digests]
        if not any(known):
            raise RequestError(
                "Incorrect API key." if key else "No API key: send Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
            )
        scope["principal"] = Principal(name="key-" + digest(key.strip()).hex()[:16])


def as_request_error(error: RequestError | HTTPException, scope: Scope) -> RequestError:
    """Starlette's 405 in our words; our own errors as they are."""
    if isinstance(error, RequestError):
        return error
    return RequestError(
        f"{scope['method']} is not served at {scope['path']}.",
        code="method_not_allowed",
        status=error.status_code,
    )


def digest(key: str) -> bytes:
    """sha256 of a key, so that comparing takes the same time whatever the lengths are."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header, or None."""
    return next((v.decode("latin-1") for key, v in scope["headers"] if key == name), None)
