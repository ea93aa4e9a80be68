"""The gateway's application: its table of routes, who may ask where, and the small answers."""

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
from headway.gateway.incoming import read_incoming, read_object
from headway.gateway.state import State
from headway.gateway.stream import StreamedAnswer
from headway.gateway.whole import answer_whole
from headway.telemetry.tasks import Outcome, no_such_task

EXPOSED = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after"),
    *("x-headway-attempts", "x-headway-upstream", "x-headway-ignored-fields"),
    *("x-headway-kv", "x-headway-context"),
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
ACCESS = {"/health": PUBLIC, "/ready": PUBLIC, "/version": KEY} | dict.fromkeys(page.PATHS, PUBLIC)
KEYED = ("/v1/",)
KEYED_PATHS = ("/tokenize", "/detokenize", "/apply-template")


def access(path: str) -> str:
    """Who may ask at a path: what is not named here is the operator's."""
    if path in ACCESS:
        return ACCESS[path]
    return KEY if path.startswith(KEYED) or path in KEYED_PATHS else OPERATOR


class Generate:
    """POST of an endpoint that takes tokens, on raw ASGI: the hot path."""

    def __init__(self, state: State, dialect: Dialect) -> None:
        self._state = state
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        try:
            incoming = await read_incoming(state, self._dialect, scope, receive, send)
            async with Account(state, incoming) as account:
                async with state.until_shutdown():
                    if await cascade.answered(state, incoming, account):
                        return
                    if not incoming.stream:
                        await answer_whole(state, incoming, account)
                if incoming.stream:
                    await StreamedAnswer(state, incoming, account).run()
            shadow.copy(state, incoming)
        except RequestError as error:
            state.metrics.add("refused", code=error.code or "refused")
            raise


def make_app(state: State, runner: Runner | None = None) -> ASGIApp:
    """The whole application; with a `runner` files and batches too, run through it."""
    endpoints: dict[str, ASGIApp] = {
        path: Generate(state, dialect) for path, dialect in DIALECTS.items()
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
            expose_headers=EXPOSED,
        )
    root = root_path.checked(options.root_path)
    return RootPath(app, root) if root else app


def log_refusal(state: State, error: RequestError, source: RequestSource) -> None:
    """The line of a request that was answered with an error, where requests have lines."""
    if state.request_log is not None:
        state.request_log.log_error_answer(error, source)


Given = TypeVar("Given")


def handler(
    given: Given, answer: Callable[[Given, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """`answer` with what it is given, the state or the runner, as Starlette calls it."""

    async def endpoint(request: Request) -> Response:
        return await answer(given, request)

    return endpoint


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise unknown_url_error(scope["path"])


# ── the small answers ───────────────────────────────────────────────────────────────────────


async def health(state: State, _: Request) -> Response:
    """200 while the process lives."""
    return json_response({"status": "ok"})


async def ready(state: State, _: Request) -> Response:
    """200 while every model has an upstream that is up, and it does not end."""
    models = {
        name: any(each.looked and not each.is_down for each in pool.upstreams)
        for name, pool in state.pools.items()
    }
    good = all(models.values()) and not state.is_draining
    status = "draining" if state.is_draining else "ready" if good else "not ready"
    content = {"status": status, "models": models}
    return json_response(content, 200 if good else 503, {} if good else {"retry-after": "1"})


async def version(state: State, _: Request) -> Response:
    return json_response({"version": headway.__version__})


async def metrics(state: State, _: Request) -> Response:
    text = state.metrics.render(state.gauges())
    return Response(text, media_type="text/plain; version=0.0.4")


async def stats(state: State, _: Request) -> Response:
    """Upstreams, routes, rollouts with their evidence, and what tasks cost."""
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


def model_card(state: State, name: str) -> dict[str, Any]:
    """One model, to OpenAI's clients and to Anthropic's."""
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


async def list_models(state: State, _: Request) -> Response:
    cards = [model_card(state, name) for name in state.model_names]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
    return json_response({"object": "list", "data": cards, "has_more": False, **ends})


async def get_model(state: State, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in state.model_names:
        state.route(name)
    return json_response(model_card(state, name))


async def outcome(state: State, request: Request) -> Response:
    """POST /v1/outcomes: whether a task of this key has succeeded."""
    raw = await read_object(state, request.scope, request.receive)
    report, owner = bodies.typed(raw, Outcome), owner_of(request.scope)
    known = state.tasks.judge(owner, report.task_id, report.success)
    if not known:
        raise no_such_task(report.task_id)
    for rollout in state.rollouts.values():
        rollout.judged(owner, report.task_id, report.success)
    state.ledger.write(
        ledger.JUDGE,
        *(owner, report.task_id, int(report.success), report.score, report.source),
        state.clock.wall_s(),
    )
    await state.ledger.flushed()
    return json_response(msgspec.to_builtins(report))


Answer = Callable[[State, Request], Awaitable[Response]]
ROUTES: list[tuple[str, str, Answer]] = [
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/stats", stats),
    ("POST", "/reload", operators.reload),
    ("POST", "/rollouts/{name}", operators.end_rollout),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/v1/outcomes", outcome),
    ("POST", "/tokenize", forward.count),
    ("POST", "/detokenize", forward.count),
    ("POST", "/apply-template", forward.count),
    ("POST", "/v1/messages/count_tokens", forward.count),
    ("POST", "/v1/responses/input_tokens", forward.count),
    ("GET", "/v1/responses/{response_id}", forward.stored),
    ("DELETE", "/v1/responses/{response_id}", forward.stored),
    ("POST", "/v1/responses/{response_id}/cancel", forward.stored),
    ("GET", "/v1/responses/{response_id}/input_items", forward.stored),
]
