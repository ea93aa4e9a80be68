"""Access control: who may send a request, and to which path. Keys are denied by default.

A pure ASGI layer around all routes. Without keys every client that reaches the address has access.
With keys every path needs one, also a path without a route, except those that are public.
"""

import ipaddress
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.core.errors import RequestError, ServerFaultError
from headway.core.principal import ANONYMOUS
from headway.core.request_source import RequestSource, client_id_of, trace_id_of
from headway.edge.errors import (
    error_response,
    speaks_anthropic,
    unknown_url_error,
    unserved_purpose,
)
from headway.edge.keys import Caller, Keyring
from headway.edge.rates import Meter
from headway.edge.relayed import MAX_USER, USER_HEADER, is_user

log = logging.getLogger(__name__)

PUBLIC, KEY, OPERATOR = "public", "key", "operator"
"""Access of a path: all clients, clients with a key, clients with an operator's key."""

OnRefused = Callable[[RequestError, RequestSource], None]
NOT_ADMIN = (
    "This path is for operators: `headway key NAME --admin` makes a key for it (admin: true in "
    "its row of the key file)."
)


class AuthMiddleware:
    """Finds the caller, gives each request an id, and turns RequestErrors into answers.

    `access` returns the access level of a path. `guard` raises RequestError for a request that is
    forbidden on a server without keys. `on_refused` is called for each refused request,
    `log_refusal` for each request that was answered with an error and is not in the log yet.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        *,
        access: Callable[[str], str],
        guard: Callable[[Scope], None] = lambda scope: None,
        on_refused: OnRefused = lambda error, source: None,
        log_refusal: OnRefused = lambda error, source: None,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._access = access
        self._guard = guard
        self._on_refused = on_refused
        self._log_refusal = log_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        source = scope["source"] = source_of(scope)
        request_id = scope["request_id"] = source.request_id
        extra = [(b"x-request-id", request_id.encode())]
        anthropic = wants_anthropic(scope)
        if anthropic:
            extra.append((b"request-id", request_id.encode()))
        if source.client_request_id is not None:
            extra.append((b"x-client-request-id", source.client_request_id.encode()))
        started = False
        meters: list[Meter] = []
        scope["meters"] = meters

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                rates = [header for meter in meters for header in meter.headers()]
                message["headers"] = [*message["headers"], *extra, *rates]
            return send(message)

        scope["app"] = self  # then Starlette raises its 405 instead of answering in plain text
        try:
            caller = self._let_in(scope)
            if "refusal" in scope:
                raise scope["refusal"]
            if scope["method"] == "POST":
                await self._metered(caller, scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except (RequestError, HTTPException) as error:
            refusal = as_request_error(error, scope)
            refusal.__traceback__ = None  # breaks a cycle: its frames hold the body
        except Exception:
            log.exception("request %s failed", request_id)
            refusal = ServerFaultError()
        else:
            return
        self._log_refusal(refusal, source)
        if not started:
            answer = error_response(refusal, request_id, anthropic=anthropic)
            await answer(scope, receive, send_with_id)

    async def _metered(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run the request within the limits of its key; response headers show the remainder."""
        meter = caller.meter
        scope["meters"].append(meter)
        try:
            meter.enter()
        except RequestError as error:
            self._on_refused(error, scope["source"])
            raise
        try:
            await self._app(scope, receive, send)
        finally:
            meter.leave()

    def _let_in(self, scope: Scope) -> Caller:
        """Return the caller and store it in the scope; raises RequestError 401 or 403."""
        try:
            caller = scope["caller"] = self._caller(scope)
        except RequestError as error:
            self._on_refused(error, scope["source"])
            raise
        name = caller.principal.name
        scope["source"].key = name if name != ANONYMOUS else None
        return caller

    def _caller(self, scope: Scope) -> Caller:
        if not self._keyring:
            self._guard(scope)
            return self._keyring.anonymous
        access = self._access(scope["path"])
        if access == PUBLIC:
            return self._keyring.anonymous
        key = request_key(scope)
        caller = self._keyring.find(key)
        if caller is None:
            raise RequestError(
                "Incorrect API key." if key else "No API key: send Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
            )
        scope["source"].key = caller.principal.name
        self._keyring.check_age(caller)
        if access == OPERATOR and not caller.admin:
            raise forbidden(NOT_ADMIN)
        return effective_caller(caller, header(scope, USER_HEADER))


class LoopbackGuard:
    """Guard of a server on loopback without keys: it refuses web pages in the user's browser.

    A foreign name in `Host` is a page whose DNS name resolves to this machine. A foreign `Origin`
    that is not among `origins` is a page that posts from another site.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def __call__(self, scope: Scope) -> None:
        host, origin = header(scope, b"host") or "", header(scope, b"origin")
        if not is_local_name(host):
            raise forbidden(
                "This server has no key and answers to this machine's own names only; start it "
                "with --api-key KEY, or with --insecure."
            )
        if scope["method"] != "POST" or origin is None or self._origins & {origin, "*"}:
            return
        if origin.partition("://")[2] != host:
            raise forbidden("This page may not ask here; name it with --allowed-origins.")


def source_of(scope: Scope) -> RequestSource:
    """Return the source of a request with a new request id; its key is not known yet."""
    return RequestSource(
        request_id=uuid.uuid4().hex,
        method=scope["method"],
        path=scope["path"],
        client_request_id=client_id_of(
            header(scope, b"x-request-id"), header(scope, b"x-client-request-id")
        ),
        trace_id=trace_id_of(header(scope, b"traceparent")),
    )


def effective_caller(caller: Caller, user: str | None) -> Caller:
    """Return the caller, or the gateway's user on whose behalf it asks; raises RequestError."""
    if user is None or not caller.relays:
        return caller
    if not is_user(user):
        raise RequestError(
            f"{USER_HEADER.decode()} must be 1 to {MAX_USER} printable characters of ASCII.",
            code="invalid_value",
        )
    return caller.for_user(user)


def request_key(scope: Scope) -> str:
    """Return the key a client sent as a bearer token or as x-api-key, or ""."""
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        key = header(scope, b"x-api-key") or ""
    return key.strip()


def is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine: an address, localhost, or nothing.

    127.0.0.1:8000, [::1], localhost:80 and a.localhost do. evil.example does not, whatever address
    it resolves to.
    """
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").rstrip(".").lower()
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def forbidden(message: str) -> RequestError:
    return RequestError(message, code="permission_denied", status=403)


def as_request_error(error: RequestError | HTTPException, scope: Scope) -> RequestError:
    """Convert Starlette's 405 to a RequestError with the methods of the path."""
    if isinstance(error, RequestError):
        return error
    if unserved_purpose(
        scope["path"]
    ):  # for example /v1/responses/compact, which looks like a response
        return unknown_url_error(scope["path"])
    return RequestError(
        f"{scope['method']} is not served at {scope['path']}.",
        code="method_not_allowed",
        status=error.status_code,
        allow=", ".join(sorted(allowed_methods(scope))),
    )


def allowed_methods(scope: Scope) -> set[str]:
    """Return the methods of all routes at a path; Starlette's own error has those of the first."""
    methods: set[str] = set()
    for route in scope["router"].routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return methods


def wants_anthropic(scope: Scope) -> bool:
    """Return whether errors have Anthropic's form: by the path, or by a header of its clients."""
    return speaks_anthropic(scope["path"]) or header(scope, b"anthropic-version") is not None


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header, or None."""
    return next((v.decode("latin-1") for key, v in scope["headers"] if key == name), None)
