"""One attempt: the body and headers sent to an upstream, and the status line of its answer."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec

from headway.core.errors import RequestError
from headway.edge.auth import header
from headway.edge.relayed import FIELD, USER_HEADER, Relayed, is_user
from headway.gateway.attempts import AttemptError, status_failure
from headway.gateway.choose import uncached_tokens
from headway.gateway.events import Event
from headway.gateway.incoming import GatewayRequest
from headway.gateway.speed import Flight
from headway.gateway.state import GatewayState
from headway.gateway.translation import translator_of, unsupported_field
from headway.gateway.upstream import UNREADABLE, Upstream

STREAM, WHOLE = "text/event-stream", "application/json"
HEADWAY_FIELDS = ("slo", "service_class", "timings", FIELD)
"""Fields that only a Headway server knows."""
OWN_METADATA = ("task", "task_id", "tags")
"""Metadata that the gateway reads; a hosted provider may refuse names that it does not know."""
N_PREDICT_KINDS = ("headway", "llama")
"""Upstream kinds that know `n_predict`, llama.cpp's name for `max_tokens`."""
SALTED_KINDS = ("headway", "vllm")
"""Upstream kinds whose prefix cache separates salts."""
CLIENT_HEADERS = (
    *("x-headway-ignored-fields", "x-headway-kv"),
    "x-headway-context",
)
MAX_HEADER = 1000


class Attempt:
    """One attempt at one upstream; it counts as in flight there from its construction."""

    def __init__(
        self, state: GatewayState, incoming: GatewayRequest, upstream: Upstream, raw: dict[str, Any]
    ) -> None:
        self.upstream = upstream
        self._incoming = incoming
        self._raw = raw
        self._translator = translator_of(
            incoming.dialect.path, upstream.speaks, incoming.shown_model
        )
        self.flight: Flight = upstream.speed.begin(
            uncached_tokens(upstream, incoming.query), incoming.query.answer
        )
        upstream.pages.add(list(incoming.query.keys))
        upstream.breaker.begin()
        self.headers = headers_for(state, incoming, upstream)

    @contextlib.asynccontextmanager
    async def answer(self, content_type: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response if it is a 200 of this type; raises AttemptError or FAILURES."""
        path, body = self._request()
        stream = content_type == STREAM
        answer = await self.upstream.post(path, body, self.headers, stream=stream)
        try:
            if answer.status != 200:
                raise await status_failure(self.upstream, answer)
            if answer.content_type != content_type:
                raise ValueError(f"{answer.content_type[:80]!r} in place of {content_type}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise ValueError("an encoding that was not asked for")
            self.upstream.take_load(answer.headers)
            yield answer
        finally:
            if answer.content.at_eof():
                answer.release()
            else:
                answer.close()

    def _request(self) -> tuple[str, bytes]:
        """Return the path and the body; AttemptError for what this upstream's API cannot take."""
        body, translator = body_for(self._incoming, self.upstream, self._raw), self._translator
        if translator is None:
            return self._incoming.dialect.path, msgspec.json.encode(body)
        try:
            with as_value_error():
                return translator.path, msgspec.json.encode(translator.request(body))
        except RequestError as error:
            raise AttemptError("untranslated", error, counts=False) from error
        except ValueError as error:
            fault = unsupported_field("This request", "a field has another type than in its API")
            fault.param = None
            raise AttemptError("untranslated", fault, counts=False) from error

    def whole(self, data: bytes) -> bytes:
        """Return a whole answer in the client's dialect; raises ValueError."""
        if self._translator is None:
            return data
        with as_value_error():
            return self._translator.whole(data)

    def events(self, events: list[Event]) -> list[Event]:
        """Return events of a stream in the client's dialect; raises ValueError."""
        if self._translator is None:
            return events
        with as_value_error():
            return self._translator.events(events)

    def end(self, prompt: int = 0, answer: int = 0) -> None:
        """End the attempt; safe to call twice."""
        num_bytes = self._incoming.prompt_bytes
        self.upstream.speed.end(self.flight, num_bytes, prompt, answer)


@contextlib.contextmanager
def as_value_error() -> Iterator[None]:
    """Turn each error of a request or an answer that is not of its dialect into a ValueError."""
    try:
        yield
    except (*UNREADABLE, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("a body that is not of its dialect") from error


def body_for(incoming: GatewayRequest, upstream: Upstream, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the request body in the fields that this upstream understands."""
    body = {**raw, "model": upstream.model_for(incoming.model)}
    if not upstream.is_headway:
        for name in HEADWAY_FIELDS:
            body.pop(name, None)
    if upstream.provider is not None:
        drop_own_metadata(body)
    if upstream.kind not in N_PREDICT_KINDS and isinstance(body.get("n_predict"), int):
        bound = body.pop("n_predict")
        if bound > 0 and incoming.answer_param == "n_predict":
            body["max_tokens"] = bound
    if upstream.kind in SALTED_KINDS and upstream.kind != "headway":
        salt = incoming.caller.principal.salted(raw.get("cache_salt")).cache_salt
        if salt:
            body["cache_salt"] = salt
    elif not upstream.is_headway:
        body.pop("cache_salt", None)
    return body


def drop_own_metadata(body: dict[str, Any]) -> None:
    """Take out of a body what its metadata tells the gateway."""
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        rest = {name: each for name, each in metadata.items() if name not in OWN_METADATA}
        del body["metadata"]
        body |= {"metadata": rest} if rest else {}


def relayed_field(relayed: Relayed) -> dict[str, Any]:
    """Return the field that carries a gateway's instructions to a Headway server."""
    content: dict[str, Any] = {"marks": relayed.marks}
    if relayed.resume is not None:
        content["resume"] = relayed.resume
    return {FIELD: content}


def headers_for(
    state: GatewayState, incoming: GatewayRequest, upstream: Upstream
) -> dict[str, str]:
    """Return the headers of an attempt: user, trace, and those that the configuration forwards."""
    return forwarded_headers(state, incoming.scope, incoming.owner, upstream)


def forwarded_headers(
    state: GatewayState, scope: Any, owner: str, upstream: Upstream
) -> dict[str, str]:
    """Return the headers to forward for any request, given its ASGI scope."""
    headers = {}
    for name in ("traceparent", *state.config.forward_headers):
        value = header(scope, name.encode())
        if value is not None and len(value) <= MAX_HEADER and value.isprintable():
            headers[name] = value
    if upstream.is_headway:
        headers.setdefault("x-request-id", scope["request_id"])  # the line in its log has it
        if is_user(owner):
            headers[USER_HEADER.decode()] = owner
    return headers


def client_headers(answer: aiohttp.ClientResponse, upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """Return the headers of a Headway server's answer that a client may see."""
    if not upstream.is_headway:
        return []
    return [
        (name.encode(), value.encode("latin-1", "replace"))
        for name in CLIENT_HEADERS
        if (value := answer.headers.get(name)) is not None
        and len(value) <= MAX_HEADER
        and value.isprintable()
    ]


def model_name_replacements(
    incoming: GatewayRequest, upstream: Upstream
) -> list[tuple[bytes, bytes]]:
    """Return the replacements that put the requested model's name back into an answer."""
    there = upstream.model_for(incoming.model)
    if there == incoming.shown_model:
        return []
    old, new = (msgspec.json.encode(name) for name in (there, incoming.shown_model))
    return [(b'"model":' + old, b'"model":' + new), (b'"model": ' + old, b'"model": ' + new)]


def replace_each(data: bytes, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Replace the first occurrence of each pair; a quoted name cannot occur in a JSON string."""
    for old, new in pairs:
        data = data.replace(old, new, 1)
    return data
