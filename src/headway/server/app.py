"""The ASGI application: the table of routes, and the handlers that do not generate.

Endpoints that generate are raw ASGI from the body to the last chunk, because they are the hot path;
Starlette does the routing, CORS and the other answers.
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
from headway.edge.auth import KEY, OPERATOR, PUBLIC, AuthMiddleware, LoopbackGuard
from headway.edge.errors import json_response, unknown_url_error
from headway.edge.relayed import LOAD_PATH
from headway.edge.root_path import RootPath
from headway.edge.serving import is_guarded
from headway.frontend.client import not_ready
from headway.server import forgetting, outcomes, page, relayed, tokens
from headway.server.anthropic import messages
from headway.server.endpoints import GENERATIONS
from headway.server.models import ServedModel, ServerState
from headway.server.openapi import build_document
from headway.server.responses import routes as response_routes
from headway.server.session import GenerationEndpoint
from headway.telemetry.calibration import take_calibration
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.stats import take_snapshot

log = logging.getLogger(__name__)

DEFAULT_TRACE_S = 5.0
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-client-request-id", "retry-after"),
    *("x-headway-ignored-fields", "x-headway-fallback", "x-headway-kv", "x-headway-context"),
    *(
        f"x-ratelimit-{figure}-{unit}"
        for figure in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Response headers that a web page of another origin may read (CORS)."""
Number = TypeVar("Number", int, float)


def make_app(state: ServerState, runner: Runner | None = None) -> ASGIApp:
    """Return the ASGI application; with a `runner` also the endpoints of files and batches."""
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
    router = Router(routes, default=unknown_path, redirect_slashes=False)
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
            expose_headers=EXPOSED_HEADERS,
        )
    root = root_path.check_root_path(options.root_path)
    return RootPath(app, root) if root else app


def log_refusal(telemetry: Telemetry, error: RequestError, source: RequestSource) -> None:
    """Log a request that was answered with an error, where requests are logged."""
    if telemetry.request_log is not None:
        telemetry.request_log.log_error_answer(error, source)


def generating_endpoints(state: ServerState) -> dict[str, ASGIApp]:
    """Return path → endpoint of each row that generates."""
    return {row.path: GenerationEndpoint(state, row) for row in GENERATIONS}


def batch_routes(runner: Runner | None, endpoints: dict[str, ASGIApp]) -> list[Route]:
    """Return the routes of files and batches, and those that lines of a batch may ask."""
    if runner is None:
        return []
    runner.endpoints = endpoints
    return [
        *[
            Route(path, runner.lane.count_requests(endpoint), methods=["POST"])
            for path, endpoint in endpoints.items()
        ],
        *[
            Route(path, handler(runner, answer), methods=[method])
            for method, path, answer in [*FILE_ROUTES, *BATCH_ROUTES, *MESSAGE_BATCH_ROUTES]
        ],
    ]


Context = TypeVar("Context")
Answer = Callable[[ServerState, Request], Awaitable[Response]]


def handler(
    context: Context, answer: Callable[[Context, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return `answer` as a Starlette endpoint; `context` is the state or the runner."""

    async def endpoint(request: Request) -> Response:
        return await answer(context, request)

    return endpoint


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise unknown_url_error(scope["path"])


# ── handlers ────────────────────────────────────────────────────────────────────────────────


async def health(state: ServerState, _: Request) -> Response:
    """Answer 200 while the process lives."""
    return json_response({"status": "ok"})


async def ready(state: ServerState, _: Request) -> Response:
    """Answer 200 when every model accepts requests, else 503 with the status of each."""
    statuses = {model.names[0]: model.client.status for model in state.rows}
    all_ready = all(model.client.ready for model in state.rows)
    content = {"status": "ready" if all_ready else "not ready", "models": statuses}
    headers = {} if all_ready else {"retry-after": "1"}
    return json_response(content, 200 if all_ready else 503, headers)


async def version(state: ServerState, _: Request) -> Response:
    return json_response({"version": headway.__version__})


async def openapi(state: ServerState, _: Request) -> Response:
    """Answer with the OpenAPI document of this server, with its models and limits."""
    return json_response(build_document(state, GENERATIONS))


async def metrics(state: ServerState, _: Request) -> Response:
    texts = []
    outcomes.export_task_metrics(state)
    for name, count in supervision.failures.items():
        state.rows[0].telemetry.registry.set("task_failures", count, name)
    for model in state.rows:
        registry = model.telemetry.registry
        registry.set("engine_restarts", model.client.num_restarts)
        registry.set("num_requests_admitted", model.admission.num_admitted)
        texts.append(model.telemetry.render())
    return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4")


def merge_metrics(texts: list[bytes]) -> bytes:
    """Merge the metrics of several models: one HELP and TYPE for each name, samples together."""
    if len(texts) == 1:
        return texts[0]
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        lines: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_known = name in families
                lines = families.setdefault(name, [])
            if not (line.startswith(b"#") and is_known):
                lines.append(line)
    return b"".join(line + b"\n" for lines in families.values() for line in lines)


async def stats(state: ServerState, request: Request) -> Response:
    """Answer with the statistics of one model, the first unless `?model=` names another.

    `?seconds=20` adds a window of that length, at most 300; `?history=true` adds the last 300
    seconds, second by second.
    """
    seconds = seconds_param(request, int)
    with_history = history_param(request)
    extra_windows_s = () if seconds is None else (seconds,)
    model = state.named_or_first(request.query_params.get("model"))
    model.telemetry.registry.set("engine_restarts", model.client.num_restarts)
    prompts, tokenizer = model.telemetry.prompts, model.tokenizer
    if prompts.due:
        await asyncio.to_thread(prompts.refresh, tokenizer.decode if tokenizer else None)
    status = model.client.status
    snapshot = take_snapshot(model.telemetry, status, extra_windows_s, with_history=with_history)
    snapshot.tasks = state.tasks.most_expensive(outcomes.MAX_TASK_GROUPS)
    return json_response(snapshot)


def history_param(request: Request) -> bool:
    """Parse `?history=true`, false by default; RequestError for any other word."""
    text = request.query_params.get("history", "false")
    if text not in ("true", "false"):
        raise RequestError(
            f"history is {text[:40]!r}; it must be true or false.",
            param="history",
            code="invalid_value",
        )
    return text == "true"


def seconds_param(request: Request, kind: type[Number]) -> Number | None:
    """Parse `?seconds=`, None without it; RequestError beyond the longest window."""
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


async def trace(state: ServerState, request: Request) -> Response:
    """Answer with the last `?seconds=` of steps and requests as a Chrome trace."""
    seconds = seconds_param(request, float) or DEFAULT_TRACE_S
    model = state.named_or_first(request.query_params.get("model"))
    return json_response(model.telemetry.trace(seconds))


async def calibration(state: ServerState, request: Request) -> Response:
    """Answer with the last `?seconds=` of raw steps, the host's overhead and the traffic without
    its text, for `headway simulate` and the what-ifs of the doctor."""
    seconds = seconds_param(request, float)
    model = state.named_or_first(request.query_params.get("model"))
    since_s = 0.0 if seconds is None else state.clock.now_s() - seconds
    content = take_calibration(model.telemetry, since_s)
    if content is None:
        raise not_ready(model.client.status)
    content.origin = model.origin()
    return Response(msgspec.json.encode(content, enc_hook=float), media_type="application/json")


def model_card(name: str, model: ServedModel) -> dict[str, Any]:
    """Return one entry of /v1/models, with the fields of OpenAI and of Anthropic."""
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


async def list_models(state: ServerState, _: Request) -> Response:
    cards = [model_card(name, model) for name, model in state.models.items()]
    ends = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return json_response({"object": "list", "data": cards, **ends})


async def get_model(state: ServerState, request: Request) -> Response:
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
    ("POST", "/cache/forget", forgetting.forget_blocks),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/apply-template", tokens.apply_template),
    ("GET", "/openapi.json", openapi),
    ("POST", "/v1/responses/input_tokens", response_routes.input_tokens),
    ("GET", "/v1/responses/{response_id}", response_routes.retrieve),
    ("DELETE", "/v1/responses/{response_id}", response_routes.delete),
    ("POST", "/v1/responses/{response_id}/cancel", response_routes.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", response_routes.input_items),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
]

# ── access ──────────────────────────────────────────────────────────────────────────────────

ACCESS: dict[str, str] = {
    "/health": PUBLIC,
    "/ready": PUBLIC,
    **dict.fromkeys(page.PATHS, PUBLIC),
    "/v1/": KEY,
    "/version": KEY,
    "/openapi.json": KEY,
    "/tokenize": KEY,
    "/detokenize": KEY,
    "/apply-template": KEY,
    "/cache/forget": KEY,
    "/metrics": OPERATOR,
    "/stats": OPERATOR,
    "/trace": OPERATOR,
    "/calibration": OPERATOR,
}
"""Path → access where there are keys; a path that ends in / holds for all below it.

A path that is not here is for operators' keys alone, so a new route is closed until a row opens it.
"""
ACCESS_PREFIXES = [path for path in ACCESS if path.endswith("/") and path != "/"]


def access(path: str) -> str:
    """Return the access of a path: /v1/models → KEY, /health → PUBLIC, unknown → OPERATOR."""
    if path in ACCESS:
        return ACCESS[path]
    prefix = next((prefix for prefix in ACCESS_PREFIXES if path.startswith(prefix)), None)
    return OPERATOR if prefix is None else ACCESS[prefix]
