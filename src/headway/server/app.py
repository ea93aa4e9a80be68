"""The application: the table of routes, and the handlers that are not generation.

Each route is an ASGI callable given the server's state. Generation is raw ASGI from the body to the
last chunk, for it is the hot path; Starlette does the routing, CORS and the small answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import headway
from headway.core.errors import RequestError
from headway.engine.text import Tokenizer
from headway.server import body as bodies
from headway.server import page
from headway.server.batches.routes import BATCH_ROUTES
from headway.server.batches.runner import Runner
from headway.server.doors import Doors, header
from headway.server.errors import json_response, not_found
from headway.server.files.routes import FILE_ROUTES
from headway.server.generation import Dialect, Generation, respond
from headway.server.models import ServedModel, State
from headway.server.openai import chat, completions
from headway.server.openai.schema import LATER, NO_OPS, ChatBody, CompletionBody, chat_messages
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.stats import take_snapshot

log = logging.getLogger(__name__)

DEFAULT_TRACE_S = 5.0
Number = TypeVar("Number", int, float)
LARGE_BODY_BYTES = 64 * 1024


def make_app(state: State, runner: Runner) -> ASGIApp:
    """The whole ASGI application; the lines of batches run through its generating endpoints."""
    runner.endpoints = generating_endpoints(state)
    routes = [
        *[
            Route(path, runner.lane.beside(endpoint), methods=["POST"])
            for path, endpoint in runner.endpoints.items()
        ],
        *[
            Route(path, handler(runner, answer), methods=[method])
            for method, path, answer in [*FILE_ROUTES, *BATCH_ROUTES]
        ],
        *[
            Route(path, handler(state, answer), methods=[method])
            for method, path, answer in SMALL_ROUTES
        ],
        *[Route(path, answer, methods=["GET"]) for path, answer in page.endpoints().items()],
    ]
    router = Router(routes, default=nothing_here, redirect_slashes=False)
    app: ASGIApp = Doors(router, state.options.api_key)
    origins = state.options.allowed_origins
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


def generating_endpoints(state: State) -> dict[str, ASGIApp]:
    """Path → endpoint of all that generates: what a client asks, and what a batch's line may."""
    return {
        "/v1/chat/completions": Generate(state, ChatBody, chat.prepare, "chatcmpl-"),
        "/v1/completions": Generate(state, CompletionBody, completions.prepare, "cmpl-"),
    }


class Generate:
    """POST endpoint that generates: body → prepare → respond, on raw ASGI."""

    def __init__(
        self,
        state: State,
        body: type[ChatBody] | type[CompletionBody],
        prepare: Callable[..., Any],
        prefix: str,
    ) -> None:
        self._state = state
        self._body = body
        self._prepare = prepare
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            generation, dialect = await self._accept(scope, receive)
        except RequestError as error:
            self._state.rows[0].telemetry.refused(error)
            raise
        await respond(self._state, generation, dialect, receive, send)

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[Generation, Dialect]:
        """The request, checked and encoded; raises RequestError."""
        state = self._state
        data = await bodies.read_body(receive, state.options.max_body)
        raw = bodies.parse_object(data)
        arrived_s = state.clock.now_s()
        bodies.refuse_later(raw, LATER)
        unknown = bodies.unknown_fields(raw, self._body, NO_OPS | LATER)
        if unknown and state.options.strict_api:
            name = unknown[0][:100]
            raise RequestError(
                f"The field {name} is unknown.", param=name, code="unknown_parameter"
            )
        body = bodies.typed(raw, self._body)
        request_id = self._prefix + scope["request_id"]
        prepare = partial(self._prepare, state, body, request_id, arrived_s)
        large = len(data) > LARGE_BODY_BYTES  # 10 MB of text take seconds to encode
        generation, dialect = await asyncio.to_thread(prepare) if large else prepare()
        if unknown:
            names = bodies.printable(unknown)
            log.warning("ignored unknown fields: %s", names)
            generation.headers.append((b"x-headway-ignored-fields", names.encode()))
        generation.parent = header(scope, b"traceparent")
        if (header(scope, b"x-stainless-retry-count") or "0") != "0":
            generation.model.telemetry.registry.add("client_retries")
        return generation, dialect


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


async def read_object(state: State, request: Request) -> dict[str, Any]:
    return bodies.parse_object(await bodies.read_body(request.receive, state.options.max_body))


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
    model = named_or_only(state, request.query_params.get("model"))
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
    model = named_or_only(state, request.query_params.get("model"))
    return json_response(model.telemetry.trace(seconds))


def model_card(name: str, model: ServedModel) -> dict[str, Any]:
    """One model as /v1/models shows it."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "headway",
        "root": model.names[0],
        "accepts": model.accepts,
        "max_model_len": model.client.info.max_model_len if model.client.info else None,
    }


async def list_models(state: State, _: Request) -> Response:
    cards = [model_card(name, model) for name, model in state.models.items()]
    return json_response({"object": "list", "data": cards})


async def get_model(state: State, request: Request) -> Response:
    name = request.path_params["name"]
    return json_response(model_card(name, state.model(name)))


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: vLLM's fields; a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def named_or_only(state: State, name: str | None) -> ServedModel:
    """The named model; without a name the only one."""
    return state.model(name if name is not None else next(iter(state.models)))


async def tokenize(state: State, request: Request) -> Response:
    body = bodies.typed(await read_object(state, request), TokenizeBody)
    model = named_or_only(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "Give either prompt or messages.", param="prompt", code="missing_required_parameter"
        )
    tokenizer = model.needs_tokenizer("prompt")
    ids = await asyncio.to_thread(prompt_ids, tokenizer, body)  # 10 MB of text take seconds
    content: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.info().max_model_len,
    }
    if body.return_token_strs:
        content["token_strs"] = [tokenizer.token(token_id) for token_id in ids]
    return json_response(content)


def prompt_ids(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    """The ids of a prompt or of messages."""
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    messages = chat_messages(body.messages or [])
    return tokenizer.chat_ids(messages, add_generation_prompt=body.add_generation_prompt)


async def detokenize(state: State, request: Request) -> Response:
    body = bodies.typed(await read_object(state, request), DetokenizeBody)
    model = named_or_only(state, body.model)
    tokenizer = model.needs_tokenizer("tokens")
    vocab_size = model.info().vocab_size
    if any(not 0 <= token < vocab_size for token in body.tokens):
        raise RequestError(
            f"tokens holds an id outside 0 … {vocab_size - 1}.",
            param="tokens",
            code="invalid_value",
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


SMALL_ROUTES: list[tuple[str, str, Answer]] = [
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/stats", stats),
    ("GET", "/trace", trace),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
