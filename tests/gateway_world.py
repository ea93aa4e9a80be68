"""A gateway in this process before stub upstreams that fail in every way, on loopback.

A stub answers `n` tokens, "t0 t1 …", as a Headway server or as any other one (as the arguments of a
call where the request has tools), and does with each request what its `faults` say: a name by the
number of the request, or a function of it.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from headway.config.options import GatewayOptions
from headway.edge.connection import ConnectionLimiter
from headway.edge.keys import Keyring
from headway.edge.relayed import FIELD, LOAD_HEADER, mark
from headway.edge.serving import http_server
from headway.gateway.app import make_app
from headway.gateway.config import (
    Config,
    GatewayModelRow,
    RolloutRow,
    UpstreamRow,
    convert_row,
    join_rows,
    with_rollouts,
)
from headway.gateway.ledger import Ledger
from headway.gateway.state import GatewayState

PROMPT_TOKENS = 10
Fault = Callable[[int], str]
TOO_LONG: dict[str, dict[str, Any]] = {
    "too_long": {"message": "too long", "code": "context_length_exceeded"},
    "too_long_vllm": {
        "message": "This model's maximum context length is 2048 tokens. However, you requested",
        "type": "BadRequestError",
        "code": 400,
    },
    "too_long_llama": {
        "message": "request (3002 tokens) exceeds the available context size (512 tokens)",
        "type": "exceed_context_size_error",
        "code": 400,
    },
}
"""How servers say that a prompt is too long, by fault."""


def healthy(number: int) -> str:
    """No request fails."""
    return ""


class Stub:
    """One upstream; `asked` are the bodies that came."""

    def __init__(
        self,
        name: str = "stub",
        *,
        headway: bool = False,
        model: str = "tiny",
        fault: Fault = healthy,
        token_s: float = 0.0,
        context: int = 4096,
        usage: bool = True,
        gap: float = 5.0,
        fingerprint: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.headway = headway
        self.model = model
        self.fault = fault
        self.token_s = token_s
        self.context = context
        self.usage = usage
        self.gap = gap
        """Nats between each token and the next likeliest, where log-probabilities are asked for."""
        self.fingerprint = fingerprint
        self.boot, self.elsewhere = "1", ""
        self.drains = False
        """Whether it lives and takes no more requests, as a Headway server that ends."""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_tokens = 0
        """Tokens sent in all."""
        self.told: dict[str, Any] = {}
        """Figures of its usage that it tells in place of its own."""
        self.num_left = 0
        """Requests whose connection was closed while it stalled."""
        self.padding = 0
        """Bytes beside the tokens of /tokenize."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> "Stub":
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/load", self._load)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/tokenize", self._tokenize)
        for path in ("completions", "responses", "messages"):
            app.router.add_post(f"/v1/{path}", self._plain)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://{self.host}:{self.port}/v1"
        return self

    async def stop(self) -> None:
        """Down: connections are closed, new ones refused; `start` takes the same port again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def load(self) -> dict[str, Any]:
        return {"queue_s": 0.0, "token_s": 0.001, "max_rows": 8, "boot": self.boot} | {
            "context": self.context
        }

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "owned_by": "headway" if self.headway else "stub"}
        return web.json_response({"data": [{**card, "max_model_len": self.context}]})

    async def _load(self, _: web.Request) -> web.Response:
        if not self.headway:
            return web.json_response({}, status=404)
        return web.json_response({} if self.drains else {self.model: self.load})

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": [1], "padding": "x" * self.padding})

    async def _embeddings(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.drains:
            return self._not_ready()
        usage = {"prompt_tokens": PROMPT_TOKENS} | self.told
        return json_of({"object": "list", "data": [], "usage": usage})

    async def _plain(self, request: web.Request) -> web.Response:
        """A whole completion, response or message of as many tokens as were asked for."""
        body = msgspec.json.decode(await request.read())
        self.asked.append(body)
        count = (body.get("max_tokens") or body.get("max_output_tokens") or 8) * (
            body.get("n") or 1
        )
        usage = self._usage(count)
        if request.path == "/v1/completions":
            return json_of({"id": "cmpl-1", "choices": [{"text": text_of(count)}], "usage": usage})
        usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": count} | self.told
        if request.path == "/v1/messages":
            return json_of({"type": "message", "content": [], "usage": usage})
        if body.get("background"):
            return json_of({"id": "resp_1", "status": "queued", "output": []})
        return json_of({"id": "resp_1", "status": "completed", "output": [], "usage": usage})

    def _not_ready(self) -> web.Response:
        error = {"message": "The model is not ready (draining).", "code": "not_ready"}
        return web.json_response({"error": error}, status=503)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.drains:
            return self._not_ready()
        fault = self.fault(len(self.asked))
        if fault.startswith("status"):
            error = {"message": "secret 10.0.0.1", "code": "some_code", "param": "x"}
            return web.json_response({"error": error}, status=int(fault[6:]))
        if fault in TOO_LONG:
            return web.json_response({"error": TOO_LONG[fault]}, status=400)
        if fault == "redirect":
            return web.Response(status=307, headers={"location": self.elsewhere})
        if fault == "stall":
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.02)
            self.num_left += 1
            return web.Response()
        if fault == "late":
            await asyncio.sleep(0.6)
        if fault == "lie":
            return web.json_response({"error": {"message": "no"}})
        if fault == "close":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if not body.get("stream"):
            return json_of(self._whole(body))
        return await self._stream(request, body, fault)

    def _usage(self, count: int) -> dict[str, Any]:
        details = {"cached_tokens": 4}
        counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count}
        return {**counts, "prompt_tokens_details": details} | self.told

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body.get("max_tokens") or 8
        self.num_tokens += count
        text = "".join(f"t{i} " for i in range(count))
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [self._logprob(f"t{i} ") for i in range(count)]}
        answer = {"id": "chatcmpl-w", "model": self.model, "choices": [choice]}
        answer |= {"system_fingerprint": self.fingerprint} if self.fingerprint else {}
        return {**answer, "usage": self._usage(count)} if self.usage else answer

    def _logprob(self, token: str) -> dict[str, Any]:
        top = [{"token": token, "logprob": -0.1}, {"token": "x", "logprob": -0.1 - self.gap}]
        return {"token": token, "logprob": -0.1, "top_logprobs": top}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream"}
        if self.headway:
            headers[LOAD_HEADER.decode()] = msgspec.json.encode(self.load).decode()
        answer = web.StreamResponse(headers=headers)
        answer.content_type = "text/event-stream"
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            await self._write(request, answer, body, fault)
        return answer

    async def _write(
        self, request: web.Request, answer: web.StreamResponse, body: dict[str, Any], fault: str
    ) -> None:
        relayed = body.get(FIELD) or {}
        resume = relayed.get("resume") or {}
        name = resume.get("id") or f"chatcmpl-{self.name}-{len(self.asked)}"
        count, first = body.get("max_tokens") or 8, len(resume.get("tokens") or ())
        cut = int(fault[5:]) if fault.startswith("reset") else None

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            if body.get("logprobs") and delta.get("content"):
                choice["logprobs"] = {"content": [self._logprob(delta["content"])]}
            content = {"id": name, "created": 7, "model": self.model, "choices": [choice]}
            return b"data: " + msgspec.json.encode(content) + b"\n\n"

        def marked(*tokens: int) -> bytes:
            return mark(PROMPT_TOKENS, 4, list(tokens)) if relayed.get("marks") else b""

        if not resume:
            await answer.write(chunk({"role": "assistant", "content": ""}))
        if fault == "error_event":
            await answer.write(b'data: {"error": {"message": "secret"}}\n\n')
            return
        for number in range(first, count):
            if number == cut:
                assert request.transport is not None
                request.transport.abort()
                return
            if fault == f"hush{number}":
                await asyncio.sleep(600)
            if self.token_s:
                await asyncio.sleep(self.token_s)
            self.num_tokens += 1
            call = {"index": 0, "function": {"arguments": f"t{number} "}}
            delta = {"tool_calls": [call]} if body.get("tools") else {"content": f"t{number} "}
            if fault.startswith("unmarked_end") and number == count - 1:
                await answer.write(chunk(delta, "stop"))
                if fault == "unmarked_end_reset":
                    await asyncio.sleep(0.05)
                    assert request.transport is not None
                    request.transport.abort()
                return
            await answer.write(chunk(delta) + marked(1000 + number))
        await answer.write(chunk({}, "stop") + marked())
        if fault == "no_end":
            return
        if self.usage and (body.get("stream_options") or {}).get("include_usage"):
            content = {"id": name, "model": self.model, "choices": [], "usage": self._usage(count)}
            await answer.write(b"data: " + msgspec.json.encode(content) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")


def config_of(stubs: list[Stub], *models: dict[str, Any], **more: Any) -> Config:
    """Rows for these stubs, each priced at 1, 0.5 and 2 dollars a million tokens."""
    price = {"input": 1.0, "cached": 0.5, "output": 2.0}
    rows = [
        convert_row(
            "test",
            {"name": s.name, "url": s.url, "price": price, **more.get(s.name, {})},
            UpstreamRow,
        )
        for s in stubs
    ]
    given = [convert_row("test", model, GatewayModelRow) for model in models]
    config = join_rows("test", rows, given, more.get("budgets", {}), more.get("headers", ()))
    rollouts = [convert_row("test", row, RolloutRow) for row in more.get("rollouts", ())]
    config = with_rollouts("test", config, rollouts)
    evidence, tasks = more.get("evidence", {}), more.get("tasks", ())
    teams = more.get("teams", {})
    return msgspec.structs.replace(config, evidence=evidence, tasks=tuple(tasks), teams=teams)


def json_of(content: dict[str, Any]) -> web.Response:
    """A whole answer with a space behind each colon; numbers may have any number of digits."""
    body = msgspec.json.encode(content).replace(b'":', b'": ')
    return web.Response(body=body, content_type="application/json")


class Gateway:
    """A gateway that serves at `url`, with its `state`."""

    def __init__(self, state: GatewayState, url: str) -> None:
        self.state = state
        self.url = url
        self.http = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))

    async def chat(self, stream: bool = True, key: str = "", **fields: Any) -> "Answer":
        """One chat of 8 tokens."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= fields.pop("headers", {})
        messages = [{"role": "user", "content": "Tell me of rivers and of the sea."}]
        body = {"model": "tiny", "messages": messages, "stream": stream, "max_tokens": 8, **fields}
        async with self.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            return Answer(answer.status, await answer.read(), dict(answer.headers))


class WholeText(msgspec.Struct):
    """A whole answer without its usage, whose numbers may be no numbers."""

    choices: list[dict[str, Any]]


class Answer:
    """What a client has got."""

    def __init__(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.status = status
        self.data = data
        self.headers = headers

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.data)

    @property
    def chunks(self) -> list[Any]:
        lines = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: {")]
        return [msgspec.json.decode(line) for line in lines]

    @property
    def text(self) -> str:
        """The text of a stream or of a whole answer."""
        if not self.data.startswith((b"data", b":")):
            return msgspec.json.decode(self.data, type=WholeText).choices[0]["message"]["content"]
        deltas = [c["delta"] for chunk in self.chunks for c in chunk.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def is_complete(self) -> bool:
        """Whether a stream has said all of it, and that it has ended, once."""
        ended = self.data.count(b"data: [DONE]\n\n") == 1 and self.data.endswith(b"[DONE]\n\n")
        return self.status == 200 and ended and self.text == text_of(8)


def text_of(count: int) -> str:
    return "".join(f"t{i} " for i in range(count))


@contextlib.asynccontextmanager
async def gateway(
    config: Config, folder: Path | None = None, **options: Any
) -> AsyncIterator[Gateway]:
    """A gateway of this configuration."""
    given = GatewayOptions(**({"data_dir": str(folder)} if folder else {}), **options)
    keyring = Keyring(flags=given.api_key, file=Path(given.key_file) if given.key_file else None)
    ledger = Ledger(folder / "gateway" if folder else None)
    state = GatewayState(options=given, config=config, keyring=keyring, ledger=ledger)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = http_server(make_app(state), ConnectionLimiter(4096), state.options)
    await state.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    live = Gateway(state, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield live
        for upstream in state.upstreams.values():
            upstream.breaker.check_integrity()
            upstream.speed.check_integrity()
        state.tasks.check_integrity()
        for rollout in state.rollouts.values():
            rollout.check_integrity()
    finally:
        await live.http.close()
        server.should_exit = True
        await serving
        await state.stop()
        listener.close()


@contextlib.asynccontextmanager
async def world(
    *stubs: Stub, folder: Path | None = None, models: tuple[dict[str, Any], ...] = (), **more: Any
) -> AsyncIterator[Gateway]:
    """A gateway before these stubs."""
    options = more.pop("options", {})
    try:
        for stub in stubs:
            await stub.start()
        async with gateway(config_of(list(stubs), *models, **more), folder, **options) as live:
            yield live
    finally:
        for stub in stubs:
            await stub.stop()
