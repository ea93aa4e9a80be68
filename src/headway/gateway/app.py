"""Application of the gateway: its routes, the access level of each path, and short endpoints."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import headway
from headway.batches.files.routes import FILE_ROUTES
from headway.batches.message_batches import MESSAGE_BATCH_ROUTES
from headway.batches.routes import BATCH_ROUTES
from headway.batches.runner import Runner
from headway.core.errors import RequestError
from headway.core.request_source import RequestSource
from headway.edge import body as bodies
from headway.edge import root_path
from headway.edge.auth import KEY, OPERATOR, PUBLIC, AuthMiddleware, LoopbackGuard
from headway.edge.errors import json_response, unknown_url_error
from headway.edge.principal import owner_of
from headway.edge.root_path import RootPath
from headway.edge.serving import is_guarded
from headway.gateway import forward, ledger, operators, page, shadow
from headway.gateway.account import Account
from headway.gateway.cascade import run as cascade
from headway.gateway.dialects import DIALECTS, Dialect
from headway.gateway.incoming import read_generation_request, read_object
from headway.gateway.spend import spend
from headway.gateway.state import GatewayState
from headway.gateway.stream import StreamedAnswer
from headway.gateway.whole import answer_from_cache, answer_whole
from headway.telemetry.tasks import Outcome, no_such_task

EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after"),
    *("x-headway-attempts", "x-headway-upstream", "x-headway-ignored-fields"),
    *("x-headway-kv", "x-headway-context", "x-headway-cache"),
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
ACCESS = {"/health": PUBLIC, "/ready": PUBLIC, "/version": KEY, "/spend": KEY} | dict.fromkeys(
    page.PATHS, PUBLIC
)
KEY_PREFIXES = ("/v1/",)
KEY_PATHS = ("/tokenize", "/detokenize", "/apply-template")


def access(path: str) -> str:
    """Return the access level of a path; any path that is not listed is the operator's."""
    if path in ACCESS:
        return ACCESS[path]
    return KEY if path.startswith(KEY_PREFIXES) or path in KEY_PATHS else OPERATOR


class RelayEndpoint:
    """POST of a generation endpoint, on raw ASGI because it is the hot path."""

    def __init__(self, state: GatewayState, dialect: Dialect) -> None:
        self._state = state
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        try:
            incoming = await read_generation_request(state, self._dialect, scope, receive, send)
            if await answer_from_cache(state, incoming):
                return
            async with Account(state, incoming) as account:
                async with state.until_shutdown():
                    if await cascade.try_cheap_route(state, incoming, account):
                        return
                    if not incoming.stream:
                        await answer_whole(state, incoming, account)
                if incoming.stream:
                    await StreamedAnswer(state, incoming, account).run()
            shadow.send_copy(state, incoming)
        except RequestError as error:
            state.metrics.add("refused", code=error.code or "refused")
            raise


def make_app(state: GatewayState, runner: Runner | None = None) -> ASGIApp:
    """Return the whole application; with a `runner` also the routes of files and batches."""
    endpoints: dict[str, ASGIApp] = {
        path: RelayEndpoint(state, dialect) for path, dialect in DIALECTS.items()
    }
    routes = []
    if runner is not None:
        runner.endpoints = endpoints
        routes += [
            Route(path, handler(runner, answer), methods=[method])
            for method, path, answer in [*FILE_ROUTES, *BATCH_ROUTES, *MESSAGE_BATCH_ROUTES]
        ]
    routes += [
        Route(
            path,
            runner.lane.count_requests(endpoint) if runner is not None else endpoint,
            methods=["POST"],
        )
        for path, endpoint in endpoints.items()
    ]
    routes += [
        Route(path, handler(state, answer), methods=[method]) for method, path, answer in ROUTES
    ]
    options = state.options
    if options.key_api:
        routes += [
            Route(path, handler(state, answer), methods=[method])
            for method, path, answer in operators.KEY_ROUTES
        ]
    here = is_guarded(options, options.insecure)
    routes += [Route(path, answer, methods=["GET"]) for path, answer in page.endpoints().items()]
    app: ASGIApp = AuthMiddleware(
        Router(routes, default=nothing_here, redirect_slashes=False),
        state.keyring,
        access=access,
        guard=LoopbackGuard(options.allowed_origins) if here else lambda scope: None,
        on_refused=lambda error, _: state.metrics.add("refused", code=error.code or "refused"),
        log_refusal=lambda error, source: log_refusal(state, error, source),
    )
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    root = root_path.check_root_path(options.root_path)
    return RootPath(app, root) if root else app


def log_refusal(state: GatewayState, error: RequestError, source: RequestSource) -> None:
    """Count a request that was answered with an error, and write its line of the request log."""
    state.refusals.add(source.key or "", error.code or "refused")
    if state.request_log is not None:
        state.request_log.log_error_answer(error, source)


Given = TypeVar("Given")


def handler(
    given: Given, answer: Callable[[Given, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Bind `answer` to the state or the runner, as a Starlette endpoint."""

    async def endpoint(request: Request) -> Response:
        return await answer(given, request)

    return endpoint


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise unknown_url_error(scope["path"])


# ── short endpoints ─────────────────────────────────────────────────────────────────────────


async def health(state: GatewayState, _: Request) -> Response:
    """Return 200 while the process lives."""
    return json_response({"status": "ok"})


async def ready(state: GatewayState, _: Request) -> Response:
    """Return 200 while every model has an upstream that is up and the gateway is not draining."""
    models = {
        name: any(each.was_reached and not each.is_down for each in pool.upstreams)
        for name, pool in state.pools.items()
    }
    good = all(models.values()) and not state.is_draining
    status = "draining" if state.is_draining else "ready" if good else "not ready"
    content = {"status": status, "models": models}
    return json_response(content, 200 if good else 503, {} if good else {"retry-after": "1"})


async def version(state: GatewayState, _: Request) -> Response:
    return json_response({"version": headway.__version__})


async def metrics(state: GatewayState, _: Request) -> Response:
    text = state.metrics.render(state.gauges())
    return Response(text, media_type="text/plain; version=0.0.4")


async def stats(state: GatewayState, _: Request) -> Response:
    """Return upstreams, routes, rollouts with their evidence, and the costs of tasks."""
    return json_response(
        {
            "upstreams": [each.snapshot() for each in state.upstreams.values()],
            "routes": [
                {
                    "model": row.name,
                    "policy": row.policy,
                    "upstreams": row.upstreams,
                    "fallbacks": row.fallbacks,
                    "cascade": state.cascades[row.name].snapshot()
                    if row.name in state.cascades
                    else None,
                }
                for row in state.config.models
            ],
            "budgets": state.budget_rows(None),
            "refusals": state.refusals.rows(None),
            "drift": state.drift.snapshot(),
            "holds": [counts.snapshot(name) for name, counts in state.holds.items()],
            "rollouts": [each.snapshot() for each in state.rollouts.values()],
            "tasks": [
                {
                    "dimension": dimension,
                    "name": name,
                    "requests": totals.requests,
                    "dollars": totals.dollars,
                    "succeeded": totals.succeeded,
                    "failed": totals.failed,
                    "cost_per_success": totals.cost_per_success,
                }
                for dimension, name, totals in state.tasks.rows()
            ],
        }
    )


def model_card(state: GatewayState, name: str) -> dict[str, Any]:
    """Return the card of one model, with the fields of OpenAI and of Anthropic."""
    _, row = state.route(name)
    contexts = [each.context for each in state.pools[row.name].upstreams if each.context]
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00+00:00",
        "owned_by": "headway-gateway",
        "max_model_len": max(contexts, default=None),
    }


async def list_models(state: GatewayState, request: Request) -> Response:
    """Return the models that the caller's key may use."""
    only = state.made_keys.models_of(owner_of(request.scope))
    cards = [model_card(state, name) for name in state.model_names if not only or name in only]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
    return json_response({"object": "list", "data": cards, "has_more": False, **ends})


async def get_model(state: GatewayState, request: Request) -> Response:
    """Return one model; RequestError 404 for an unknown one, 403 for one the key may not use."""
    name = request.path_params["name"]
    state.check_use(owner_of(request.scope), *state.route(name))
    return json_response(model_card(state, name))


async def outcome(state: GatewayState, request: Request) -> Response:
    """POST /v1/outcomes: record whether a task of this key succeeded."""
    raw = await read_object(state, request.scope, request.receive)
    report, owner = bodies.typed(raw, Outcome), owner_of(request.scope)
    known = state.tasks.judge(owner, report.task_id, report.success)
    if not known:
        raise no_such_task(report.task_id)
    for rollout in state.rollouts.values():
        rollout.add_outcome(owner, report.task_id, report.success)
    state.ledger.write(
        ledger.ADD_OUTCOME,
        *(owner, report.task_id, int(report.success), report.score, report.source),
        state.clock.wall_s(),
    )
    await state.ledger.flushed()
    return json_response(msgspec.to_builtins(report))


Answer = Callable[[GatewayState, Request], Awaitable[Response]]
ROUTES: list[tuple[str, str, Answer]] = [
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/stats", stats),
    ("GET", "/spend", spend),
    ("POST", "/reload", operators.reload),
    ("POST", "/rollouts/{name}", operators.end_rollout),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/v1/outcomes", outcome),
    ("POST", "/tokenize", forward.forward_count),
    ("POST", "/detokenize", forward.forward_count),
    ("POST", "/apply-template", forward.forward_count),
    ("POST", "/v1/messages/count_tokens", forward.forward_count),
    ("POST", "/v1/responses/input_tokens", forward.forward_count),
    ("GET", "/v1/responses/{response_id}", forward.forward_stored),
    ("DELETE", "/v1/responses/{response_id}", forward.forward_stored),
    ("POST", "/v1/responses/{response_id}/cancel", forward.forward_stored),
    ("GET", "/v1/responses/{response_id}/input_items", forward.forward_stored),
]
