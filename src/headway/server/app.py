"""The application: the table of routes, and the handlers that are not generation.

Each route is an ASGI callable given the server's state. Generation is raw ASGI from the body to the
last chunk, for it is the hot path; Starlette does the routing, CORS and the small answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
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
from headway.core import supervision
from headway.core.errors import RequestError
from headway.core.request_source import RequestSource
from headway.edge import root_path
from headway.edge.auth import AuthMiddleware, LoopbackGuard
from headway.edge.errors import json_response, unknown_url_error
from headway.edge.relayed import LOAD_PATH
from headway.edge.root_path import RootPath
from headway.edge.serving import is_guarded
from headway.frontend.client import not_ready
from headway.server import forgetting, outcomes, page, relayed, tokens
from headway.server.access import access
from headway.server.anthropic import messages
from headway.server.endpoints import GENERATIONS
from headway.server.models import ServedModel, State
from headway.server.openapi import document
from headway.server.responses import stored
from headway.server.session import Generate
from headway.telemetry.calibration import take_calibration
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.stats import take_snapshot

log = logging.getLogger(__name__)

DEFAULT_TRACE_S = 5.0
EXPOSED = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after"),
    *("x-headway-ignored-fields", "x-headway-fallback", "x-headway-kv", "x-headway-context"),
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
"""Headers of ours that a web page from elsewhere may read."""
Number = TypeVar("Number", int, float)


def make_app(state: State, runner: Runner | None = None) -> ASGIApp:
    """The whole ASGI application; with a `runner` files and batches too, run through it."""
    endpoints = generating_endpoints(state)
    routes = [
        *batch_routes(runner, endpoints),
        *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
        *[
            Route(path, handler(state, answer), methods=[method])
            for method, path, answer in SMALL_ROUTES
        ],
        *[Route(path, answer, methods=["GET"]) for path, answer in page.endpoints().items()],
    ]
    router = Router(routes, default=nothing_here, redirect_slashes=False)
    options = state.options
    origins = options.allowed_origins
    here = is_guarded(options, options.insecure)
    telemetry = state.rows[0].telemetry
    app: ASGIApp = AuthMiddleware(
        router,
        state.keyring,
        access=access,
        guard=LoopbackGuard(origins) if here else lambda scope: None,
        on_refused=lambda error, source: telemetry.on_rejection(error, source=source),
        log_refusal=lambda error, source: log_refusal(telemetry, error, source),
    )
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    root = root_path.checked(options.root_path)
    return RootPath(app, root) if root else app


def log_refusal(telemetry: Telemetry, error: RequestError, source: RequestSource) -> None:
    """The line of a request that was answered with an error, where requests have lines."""
    if telemetry.request_log is not None:
        telemetry.request_log.log_error_answer(error, source)


def generating_endpoints(state: State) -> dict[str, ASGIApp]:
    """Path → endpoint of all that generates."""
    return {row.path: Generate(state, row) for row in GENERATIONS}


def batch_routes(runner: Runner | None, endpoints: dict[str, ASGIApp]) -> list[Route]:
    """Files and batches, and what generates: a line of a batch may ask the same endpoints."""
    if runner is None:
        return []
    runner.endpoints = endpoints
    return [
        *[
            Route(path, runner.lane.beside(endpoint), methods=["POST"])
            for path, endpoint in endpoints.items()
        ],
        *[
            Route(path, handler(runner, answer), methods=[method])
            for method, path, answer in [*FILE_ROUTES, *BATCH_ROUTES, *MESSAGE_BATCH_ROUTES]
        ],
    ]


Given = TypeVar("Given")
Answer = Callable[[State, Request], Awaitable[Response]]


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
    """200 when every model takes requests, else 503 with what it is doing."""
    statuses = {model.names[0]: model.client.status for model in state.rows}
    all_ready = all(model.client.ready for model in state.rows)
    content = {"status": "ready" if all_ready else "not ready", "models": statuses}
    headers = {} if all_ready else {"retry-after": "1"}
    return json_response(content, 200 if all_ready else 503, headers)


async def version(state: State, _: Request) -> Response:
    return json_response({"version": headway.__version__})


async def openapi(state: State, _: Request) -> Response:
    """The OpenAPI document of what this server takes, with its models and its limits."""
    return json_response(document(state, GENERATIONS))


async def metrics(state: State, _: Request) -> Response:
    texts = []
    outcomes.show(state)
    for name, count in supervision.failures.items():
        state.rows[0].telemetry.registry.set("task_failures", count, name)
    for model in state.rows:
        registry = model.telemetry.registry
        registry.set("engine_restarts", model.client.num_restarts)
        registry.set("num_requests_admitted", model.admission.num_admitted)
        texts.append(model.telemetry.render())
    return Response(merged(texts), media_type="text/plain; version=0.0.4")


def merged(texts: list[bytes]) -> bytes:
    """The metrics of several models, what is said of a name said once, its samples together."""
    if len(texts) == 1:
        return texts[0]
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        lines: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                seen = name in families
                lines = families.setdefault(name, [])
            if not (line.startswith(b"#") and seen):
                lines.append(line)
    return b"".join(line + b"\n" for lines in families.values() for line in lines)


async def stats(state: State, request: Request) -> Response:
    """One model, now and over the last minutes; the only one unless `?model=` names it.

    `?seconds=20` adds a window of that length, at most 300; `?history=true` the last 300 seconds,
    second by second.
    """
    seconds = asked_seconds(request, int)
    past = asked_history(request)
    more_s = () if seconds is None else (seconds,)
    model = state.named_or_first(request.query_params.get("model"))
    model.telemetry.registry.set("engine_restarts", model.client.num_restarts)
    prompts, tokenizer = model.telemetry.prompts, model.tokenizer
    if prompts.due:
        await asyncio.to_thread(prompts.refresh, tokenizer.decode if tokenizer else None)
    status = model.client.status
    snapshot = take_snapshot(model.telemetry, status, more_s, with_history=past)
    snapshot.tasks = state.tasks.most_expensive(outcomes.MOST_SHOWN)
    return json_response(snapshot)


def asked_history(request: Request) -> bool:
    """`?history=true`, false without it; RequestError for any other word."""
    text = request.query_params.get("history", "false")
    if text not in ("true", "false"):
        raise RequestError(
            f"history is {text[:40]!r}; it must be true or false.",
            param="history",
            code="invalid_value",
        )
    return text == "true"


def asked_seconds(request: Request, kind: type[Number]) -> Number | None:
    """`?seconds=` as an int or a float, None without it; RequestError beyond what is kept."""
    text = request.query_params.get("seconds")
    if text is None:
        return None
    try:
        seconds = kind(text)
    except ValueError:
        seconds = kind(0)
    if not 0 < seconds <= max(WINDOWS_S):
        raise RequestError(
            f"seconds is {text[:40]!r}; it must be above 0 and at most {max(WINDOWS_S)}.",
            param="seconds",
            code="invalid_value",
        )
    return seconds


async def trace(state: State, request: Request) -> Response:
    """The last `?seconds=` of steps and requests as a Chrome trace."""
    seconds = asked_seconds(request, float) or DEFAULT_TRACE_S
    model = state.named_or_first(request.query_params.get("model"))
    return json_response(model.telemetry.trace(seconds))


async def calibration(state: State, request: Request) -> Response:
    """The last `?seconds=` of steps, raw, what the host adds, and the traffic without its text: for
    `headway simulate`, and the doctor's what-ifs."""
    seconds = asked_seconds(request, float)
    model = state.named_or_first(request.query_params.get("model"))
    since_s = 0.0 if seconds is None else state.clock.now_s() - seconds
    found = take_calibration(model.telemetry, since_s)
    if found is None:
        raise not_ready(model.client.status)
    found.origin = model.origin()
    return Response(msgspec.json.encode(found, enc_hook=float), media_type="application/json")


def model_card(name: str, model: ServedModel) -> dict[str, Any]:
    """One model as /v1/models shows it, to OpenAI's clients and to Anthropic's."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "owned_by": "headway",
        "root": model.names[0],
        "accepts": model.accepts,
        "max_model_len": model.client.info.max_model_len if model.client.info else None,
    }


async def list_models(state: State, _: Request) -> Response:
    cards = [model_card(name, model) for name, model in state.models.items()]
    ends = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return json_response({"object": "list", "data": cards, **ends})


async def get_model(state: State, request: Request) -> Response:
    name = request.path_params["name"]
    return json_response(model_card(name, state.model(name)))


SMALL_ROUTES: list[tuple[str, str, Answer]] = [
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/stats", stats),
    ("GET", "/trace", trace),
    ("GET", "/calibration", calibration),
    ("GET", LOAD_PATH, relayed.load),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/v1/outcomes", outcomes.outcome),
    ("POST", "/cache/forget", forgetting.forget),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/apply-template", tokens.apply_template),
    ("GET", "/openapi.json", openapi),
    ("POST", "/v1/responses/input_tokens", stored.input_tokens),
    ("GET", "/v1/responses/{response_id}", stored.retrieve),
    ("DELETE", "/v1/responses/{response_id}", stored.delete),
    ("POST", "/v1/responses/{response_id}/cancel", stored.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", stored.input_items),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
]
