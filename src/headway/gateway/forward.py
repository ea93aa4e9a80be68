"""Endpoints that are forwarded whole: token counts and stored responses."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.edge.principal import owner_of
from headway.gateway.ask import WHOLE, forwarded_headers
from headway.gateway.attempts import AttemptError, connection_failure, status_failure
from headway.gateway.choose import RoutingQuery
from headway.gateway.incoming import read_object
from headway.gateway.state import GatewayState, canonical_name
from headway.gateway.upstream import FAILURES, Upstream

FORWARD_S = 60.0
MAX_STORED_BYTES, MAX_COUNT_BYTES, MAX_TIMES_BODY = 64 * 2**20, 2**20, 8
"""Maximum bytes of an answer: of a stored response; of a count, plus this multiple of the request's
body, because /tokenize returns some bytes per token."""
MAX_TRIES = 2


async def forward_count(state: GatewayState, request: Request) -> Response:
    """Forward POST of a small endpoint that a Headway server has: /tokenize, …/count_tokens.

    Returns the first upstream's answer that succeeds; raises RequestError.
    """
    raw = await read_object(state, request.scope, request.receive)
    given = raw.get("model")
    model, route = state.route(given if isinstance(given, str) else None)
    state.check_use(owner_of(request.scope), model, route)
    model = canonical_name(model, route)
    query, path = RoutingQuery(model=model), request.scope["path"]
    without = {each for each in state.upstreams.values() if not each.has_path(path)}
    state.budget.request()
    last: RequestError | None = None
    num_tries, free = MAX_TRIES, True
    while num_tries:
        upstream = state.pools[route.name].choose(query, without)
        if upstream is None or not (free or state.budget.take()):
            break
        body = msgspec.json.encode({**raw, "model": upstream.model_for(model)})
        try:
            return await forward_once(state, request, upstream, "POST", body)
        except AttemptError as failure:
            last = failure.error
            without.add(upstream)
            if not failure.again:
                break
            free = failure.outcome == "away"
            num_tries -= not free
    raise last or RequestError(
        f"No upstream of {model[:80]} has this endpoint.", code="no_upstream", status=503
    )


async def forward_stored(state: GatewayState, request: Request) -> Response:
    """Forward a request for a stored response to the upstream that stores it; owners only."""
    name, owner = request.path_params["response_id"], owner_of(request.scope)
    keeper = state.keeper_of(name, owner)
    if keeper is None:
        raise RequestError(
            f"The response {name[:80]!r} is not stored here.", code="not_found", status=404
        )
    try:
        return await forward_once(state, request, keeper, request.method, None)
    except AttemptError as failure:
        raise failure.error from failure


async def forward_once(
    state: GatewayState, request: Request, upstream: Upstream, method: str, body: bytes | None
) -> Response:
    """Forward one request to one upstream; raises AttemptError."""
    scope = request.scope
    headers = forwarded_headers(state, scope, owner_of(scope), upstream)
    path = scope["path"]
    if body is None and scope["query_string"]:
        path += "?" + scope["query_string"].decode("latin-1")
    max_bytes = MAX_STORED_BYTES
    if body is not None:
        max_bytes = MAX_COUNT_BYTES + MAX_TIMES_BODY * len(body)
    upstream.breaker.begin()
    try:
        async with state.until_shutdown(), asyncio.timeout(FORWARD_S):
            if body is None:
                answer = await upstream.request(method, path, headers)
            else:
                answer = await upstream.post(path, body, headers)
            async with answer:
                if answer.status != 200:
                    raise await status_failure(upstream, answer)
                if answer.content_type != WHOLE:
                    raise ValueError(f"{answer.content_type[:80]!r} in place of {WHOLE}")
                data = await upstream.read(answer, max_bytes)
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except AttemptError as failure:
        (upstream.breaker.failed if failure.counts else upstream.breaker.record_abort)()
        upstream.is_unavailable = upstream.is_unavailable or failure.outcome == "away"
        raise
    except FAILURES as error:
        upstream.breaker.failed()
        raise connection_failure(error) from error
    except (asyncio.CancelledError, RequestError):  # the client disconnected, or a shutdown
        upstream.breaker.record_abort()
        raise
    upstream.breaker.succeeded()
    return Response(data, media_type=WHOLE)
