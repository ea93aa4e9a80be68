"""One attempt: the body an upstream is sent, and the beginning of its answer."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from headway.edge.auth import header
from headway.edge.relayed import FIELD, USER_HEADER, Relayed, is_user
from headway.gateway.attempts import refused
from headway.gateway.choose import uncached
from headway.gateway.incoming import Incoming
from headway.gateway.speed import Flight
from headway.gateway.state import State
from headway.gateway.upstream import Upstream

STREAM, WHOLE = "text/event-stream", "application/json"
OURS = ("slo", "service_class", "timings", FIELD)
"""Fields that a Headway server alone knows."""
PREDICTS = ("headway", "llama")
"""Kinds that know llama.cpp's name for the length of an answer."""
SALTED = ("headway", "vllm")
"""Kinds whose prefix caches keep salts apart."""
PASSED_BACK = (
    *("x-headway-ignored-fields", "x-headway-kv"),
    "x-headway-context",
)
MAX_HEADER = 1000


class Attempt:
    """One attempt at one upstream; it counts there from the moment it is chosen."""

    def __init__(
        self, state: State, incoming: Incoming, upstream: Upstream, raw: dict[str, Any]
    ) -> None:
        self.upstream = upstream
        self._incoming = incoming
        self.body = body_for(incoming, upstream, raw)
        self.flight: Flight = upstream.speed.begin(
            uncached(upstream, incoming.query), incoming.query.answer
        )
        upstream.pages.add(list(incoming.query.keys))
        upstream.breaker.begin()
        self.headers = headers_for(state, incoming, upstream)

    @contextlib.asynccontextmanager
    async def answer(self, content_type: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 of this type; raises AttemptError, or one of FAILURES."""
        path = self._incoming.dialect.path
        stream = content_type == STREAM
        answer = await self.upstream.post(path, self.body, self.headers, stream=stream)
        try:
            if answer.status != 200:
                raise await refused(self.upstream, answer)
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

    def end(self, prompt: int = 0, answer: int = 0) -> None:
        """It is over; safe to call twice."""
        num_bytes = self._incoming.prompt_bytes
        self.upstream.speed.end(self.flight, num_bytes, prompt, answer)


def body_for(incoming: Incoming, upstream: Upstream, raw: dict[str, Any]) -> bytes:
    """The body as this upstream understands it."""
    body = {**raw, "model": upstream.model_for(incoming.model)}
    if not upstream.is_headway:
        for name in OURS:
            body.pop(name, None)
    if upstream.kind not in PREDICTS and isinstance(body.get("n_predict"), int):
        bound = body.pop("n_predict")
        if bound > 0 and incoming.answer_param == "n_predict":
            body["max_tokens"] = bound
    if upstream.kind in SALTED and upstream.kind != "headway":
        salt = incoming.caller.principal.salted(raw.get("cache_salt")).cache_salt
        if salt:
            body["cache_salt"] = salt
    elif not upstream.is_headway:
        body.pop("cache_salt", None)
    return msgspec.json.encode(body)


def relayed_field(relayed: Relayed) -> dict[str, Any]:
    """The field that a Headway server takes from a gateway."""
    content: dict[str, Any] = {"marks": relayed.marks}
    if relayed.resume is not None:
        content["resume"] = relayed.resume
    return {FIELD: content}


def headers_for(state: State, incoming: Incoming, upstream: Upstream) -> dict[str, str]:
    """What goes with a request: who asks, the trace, and what the configuration lets through."""
    return passed_headers(state, incoming.scope, incoming.owner, upstream)


def passed_headers(state: State, scope: Any, owner: str, upstream: Upstream) -> dict[str, str]:
    """The same of any request."""
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


def passed_back(answer: aiohttp.ClientResponse, upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """Headers of a Headway server that its client may see."""
    if not upstream.is_headway:
        return []
    return [
        (name.encode(), value.encode("latin-1", "replace"))
        for name in PASSED_BACK
        if (value := answer.headers.get(name)) is not None
        and len(value) <= MAX_HEADER
        and value.isprintable()
    ]


def renamed(incoming: Incoming, upstream: Upstream) -> list[tuple[bytes, bytes]]:
    """What is replaced in an answer: the model's name there by the one that was asked for."""
    there = upstream.model_for(incoming.model)
    if there == incoming.model:
        return []
    old, new = (msgspec.json.encode(name) for name in (there, incoming.model))
    return [(b'"model":' + old, b'"model":' + new), (b'"model": ' + old, b'"model": ' + new)]


def replaced(data: bytes, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Each first occurrence replaced; a quoted name cannot stand inside a JSON string."""
    for old, new in pairs:
        data = data.replace(old, new, 1)
    return data
