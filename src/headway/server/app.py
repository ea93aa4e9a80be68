"""The application: the table of routes, and the handlers that are not generation.

Each route is an ASGI callable given the server's state. Generation is raw ASGI from the body to the
last chunk, for it is the hot path; Starlette does the routing, CORS and the small answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import headway
from headway.core.errors import RequestError
from headway.core.service import ServiceClass, choose_class
from headway.server import body as bodies
from headway.server import page, tokens
from headway.server.anthropic import messages
from headway.server.anthropic import schema as anthropic_schema
from headway.server.anthropic.schema import MessagesBody
from headway.server.batches.routes import BATCH_ROUTES
from headway.server.batches.runner import Runner
from headway.server.doors import Doors, HereOnly, header, is_loopback
from headway.server.errors import json_response, not_found
from headway.server.files.routes import FILE_ROUTES
from headway.server.generation import Dialect, Generation, respond
from headway.server.keys import Caller
from headway.server.models import ServedModel, State
from headway.server.openai import chat, completions
from headway.server.openai.schema import (
    CHAT_ONLY,
    LATER,
    NO_OPS,
    ChatBody,
    CompletionBody,
)
from headway.server.openapi import document
from headway.server.principal import owner_of
from headway.server.responses import create as responses
from headway.server.responses import schema as responses_schema
from headway.server.responses import stored
from headway.server.responses.schema import ResponsesBody
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.stats import take_snapshot

log = logging.getLogger(__name__)

DEFAULT_TRACE_S = 5.0
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
    here = is_loopback(options.host) and not options.insecure
    app: ASGIApp = Doors(
        router,
        state.keyring,
        guard=HereOnly(origins) if here else lambda scope: None,
        on_refused=state.rows[0].telemetry.refused,
    )
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """An endpoint that generates: what it takes, how that is prepared and answered."""

    path: str
    accepts: bodies.Accepts
    prepare: Callable[..., Any]
    prefix: str
    respond: Callable[..., Awaitable[None]] = respond
    chats: bool = True
    """Whether a template is rendered."""
    owned: bool = False
    """Whether `prepare` wants the name of the key that asks."""


GENERATIONS = (
    GenerationRow(
        path="/v1/chat/completions",
        accepts=bodies.Accepts(ChatBody, NO_OPS, LATER),
        prepare=chat.prepare,
        prefix="chatcmpl-",
    ),
    GenerationRow(
        path="/v1/completions",
        accepts=bodies.Accepts(CompletionBody, NO_OPS, LATER | CHAT_ONLY),
        prepare=completions.prepare,
        chats=False,
        prefix="cmpl-",
    ),
    GenerationRow(
        path="/v1/responses",
        accepts=bodies.Accepts(ResponsesBody, responses_schema.NO_OPS, responses_schema.LATER),
        prepare=responses.prepare,
        prefix=responses.PREFIX,
        respond=responses.respond,
        owned=True,
    ),
    GenerationRow(
        path="/v1/messages",
        accepts=bodies.Accepts(MessagesBody, anthropic_schema.NO_OPS, anthropic_schema.LATER),
        prepare=messages.prepare,
        prefix="msg_",
    ),
)


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
            for method, path, answer in [*FILE_ROUTES, *BATCH_ROUTES]
        ],
    ]


class Generate:
    """POST endpoint that generates: body → prepare → respond, on raw ASGI."""

    def __init__(self, state: State, row: GenerationRow) -> None:
        self._state = state
        self._row = row

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            generation, dialect = await self._accept(scope, receive)
        except RequestError as error:
            self._state.rows[0].telemetry.refused(error)
            raise
        await self._row.respond(self._state, generation, dialect, receive, send)

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[Generation, Dialect]:
        """The request, checked and encoded; raises RequestError."""
        state = self._state
        data = await bodies.read_body(receive, state.options.max_body)
        raw = bodies.parse_object(data)
        arrived_s = state.clock.now_s()
        row, caller = self._row, scope.get("caller") or state.keyring.nobody
        body, unknown = row.accepts.read(raw, state.options.strict_api)
        service_class = class_of(state, body, caller)
        owner = {"owner": owner_of(scope)} if row.owned else {}
        prepare = partial(row.prepare, state, body, row.prefix + scope["request_id"], **owner)
        # 10 MB of text take seconds to encode; a chat waits for the process that renders it
        slow = len(data) > bodies.LARGE_BODY_BYTES or row.chats
        generation, dialect = (
            await asyncio.to_thread(prepare, arrived_s) if slow else prepare(arrived_s)
        )
        if unknown:
            names = bodies.printable(unknown)
            log.warning("ignored unknown fields: %s", names)
            generation.headers.append((b"x-headway-ignored-fields", names.encode()))
        generation.caller = caller
        generation.service_class = service_class
        generation.parent = header(scope, b"traceparent")
        if (header(scope, b"x-stainless-retry-count") or "0") != "0":
            generation.model.telemetry.registry.add("client_retries")
        return generation, dialect


def class_of(state: State, body: Any, caller: Caller) -> ServiceClass:
    """The class that a body names, else its key's, else the default; raises RequestError."""
    classes = state.model(body.model).telemetry.classes
    if body.service_class is None and body.service_tier is None:
        return choose_class(classes, caller.service_class, None)
    return choose_class(classes, body.service_class, body.service_tier)


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
    raise not_found(scope["path"])


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
    text = b""
    for model in state.rows:
        model.telemetry.registry.set("engine_restarts", model.client.num_restarts)
        text += model.telemetry.render()
    return Response(text, media_type="text/plain; version=0.0.4")


async def stats(state: State, request: Request) -> Response:
    """One model, now and over the last minutes; the only one unless `?model=` names it.

    `?seconds=20` adds a window of that length, at most 300.
    """
    seconds = asked_seconds(request, int)
    more_s = () if seconds is None else (seconds,)
    model = state.named_or_only(request.query_params.get("model"))
    model.telemetry.registry.set("engine_restarts", model.client.num_restarts)
    prompts, tokenizer = model.telemetry.prompts, model.tokenizer
    if prompts.due:
        await asyncio.to_thread(prompts.refresh, tokenizer.decode if tokenizer else None)
    return json_response(take_snapshot(model.telemetry, model.client.status, more_s))


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
    model = state.named_or_only(request.query_params.get("model"))
    return json_response(model.telemetry.trace(seconds))


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
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
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
