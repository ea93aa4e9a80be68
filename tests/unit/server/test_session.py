"""However a request ends, its session has closed its ticket, its streams and its timeline.

The endpoints, admission, telemetry and the engine are real; the engine does not step unless a test
lets it, so a request waits until something ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from headway.core.errors import (
    EngineDownError,
    OverloadedError,
    RequestError,
    ServerFaultError,
    ShedError,
)
from headway.edge import event_stream
from headway.server import session as sessions
from headway.server.endpoints import GENERATIONS
from headway.server.generation import GenerationRow
from headway.server.models import ServedModel, ServerState
from headway.server.openai.chat import ChatDialect
from headway.server.responses import create
from headway.server.session import GenerationEndpoint
from headway.telemetry.timeline import RequestTimeline
from in_process import fake_state

USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
}
PATHS = tuple(BODIES)
ROWS = {row.path: row for row in GENERATIONS}
CHAT = PATHS[0]


class Exchange:
    """One request to an endpoint, and what has been sent to its client."""

    def __init__(self, state: ServerState, path: str, **fields: Any) -> None:
        self.model = state.rows[0]
        self.sent: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()
        body = msgspec.json.encode({"model": "tiny", **BODIES[path], **fields})
        self._bodies = [{"type": "http.request", "body": body}]
        scope = {"type": "http", "path": path, "request_id": "1", "headers": [], "meters": []}
        app = GenerationEndpoint(state, ROWS[path])
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            return self._bodies.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def submitted(self) -> RequestTimeline:
        """Its timeline, once the engine has it."""
        while not self.model.telemetry.live:
            assert not self.task.done()
            await asyncio.sleep(0.001)
        (timeline,) = self.model.telemetry.live
        return timeline

    async def opened(self) -> None:
        while not self.sent:
            await asyncio.sleep(0.001)

    def fails(self, error: RequestError) -> None:
        """The engine says so instead of an update."""
        for stream in list(self.model.client._streams.values()):
            stream.fail(error)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
async def state() -> AsyncIterator[ServerState]:
    state = fake_state()
    yield state
    await state.rows[0].client.stop()
    closed(state.rows[0])


def closed(model: ServedModel) -> None:
    """Nothing is held any more."""
    model.admission.check_integrity()
    assert model.admission.num_admitted == 0, "a ticket is open"
    assert not model.admission.queues.by_engine[0].forecast.entries, "it stands in the queue"
    assert model.client.num_requests == 0, "a stream is open"
    assert model.client.engine.num_requests == 0, "the engine still has it"
    assert not model.telemetry.live, "its timeline has no end"
    assert all(meter.num_running == 0 for meter in model.admission._meters.values())


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("path", PATHS)
async def test_answered(state: ServerState, path: str, streams: bool) -> None:
    exchange = Exchange(state, path, stream=streams)
    timeline = await exchange.submitted()
    assert state.rows[0].admission.num_admitted == 1
    await state.rows[0].client.start()
    await exchange.task
    assert exchange.status == 200
    assert timeline.ended is not None and timeline.ended.outcome == "ok"
    closed(state.rows[0])


async def by_cancelling(exchange: Exchange) -> None:
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task


async def by_leaving(exchange: Exchange) -> None:
    exchange.leaves.set()
    await exchange.task


def by_failing(error: RequestError, status: int) -> Callable[[Exchange], Awaitable[None]]:
    async def fail(exchange: Exchange) -> None:
        exchange.fails(error)
        await exchange.task
        assert exchange.status == status

    return fail


ENDS = {
    "cancelled": (by_cancelling, "left", {}),
    "left": (by_leaving, "left", {"request_success": ("abort",)}),
    "died": (by_failing(EngineDownError("It died.", code="engine_died"), 503), "failed", {}),
    "fault": (by_failing(ServerFaultError(), 500), "failed", {}),
    "refused": (
        by_failing(RequestError("No.", code="unsupported_keyword"), 400),
        "invalid",
        {"validation_failures": ("request",)},
    ),
    "shed": (by_failing(ShedError(), 503), "moved", {"admission_rejections": ("given_up",)}),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", PATHS)
async def test_ended_before_anything_was_sent(
    state: ServerState, path: str, end: str, streams: bool
) -> None:
    ends, outcome, counted = ENDS[end]
    exchange = Exchange(state, path, stream=streams)
    timeline = await exchange.submitted()
    await ends(exchange)
    assert timeline.ended is not None and timeline.ended.outcome == outcome
    values = state.rows[0].telemetry.registry.values
    assert {name: values[name].get(labels) for name, labels in counted.items()} == dict.fromkeys(
        counted, 1.0
    )
    closed(state.rows[0])


@pytest.mark.parametrize(
    ("end", "outcome"),
    [("cancelled", "left"), ("left", "left"), ("shed", "refused"), ("died", "failed")],
)
@pytest.mark.parametrize("path", PATHS)
async def test_ended_when_its_stream_was_open(
    state: ServerState, path: str, end: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would have had a status is an event then, and is counted here alone."""
    monkeypatch.setattr(event_stream, "TICK_S", 0.001)
    monkeypatch.setattr(sessions, "ENGINE_WAIT_S", 0.0)
    exchange = Exchange(state, path, stream=True)
    timeline = await exchange.submitted()
    await exchange.opened()
    error = {"shed": ShedError(), "died": EngineDownError("It died.")}.get(end)
    await (by_failing(error, 200) if error else ENDS[end][0])(exchange)
    assert timeline.ended is not None and timeline.ended.outcome == outcome
    assert (b'"error":{' in exchange.data) == (error is not None)
    assert b"[DONE]" not in exchange.data
    closed(state.rows[0])


@pytest.mark.parametrize("path", PATHS)
async def test_refused_before_the_engine_had_it(state: ServerState, path: str) -> None:
    """A prompt that does not fit; an engine that takes the first of two prompts alone."""
    long = "word " * 2000
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    value = [{"role": "user", "content": long}] if field == "messages" else long
    with pytest.raises(RequestError, match="context holds"):
        await Exchange(state, path, **{field: value}).task
    closed(state.rows[0])


async def test_an_engine_that_goes_between_two_prompts(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = state.rows[0].client
    submit = client.submit

    def once(*given: Any, **named: Any) -> Any:
        if client.num_requests:
            raise EngineDownError("The model is not ready.", code="not_ready")
        return submit(*given, **named)

    monkeypatch.setattr(client, "submit", once)
    with pytest.raises(EngineDownError):
        await Exchange(state, "/v1/completions").task
    (timeline,) = state.rows[0].telemetry.finished
    assert timeline.ended is not None and timeline.ended.outcome == "refused"
    closed(state.rows[0])


async def test_a_refusal_is_counted_once() -> None:
    """Where the second engine refuses too, and where too many run in the background."""
    first, second = fake_state(max_queue=1), fake_state(max_queue=1).rows[0]
    second.names = ["second"]
    first.models["second"], first.fallback_model = second, "second"
    waiting = [Exchange(first, CHAT, model=name) for name in ("tiny", "second")]
    while not all(row.telemetry.live for row in first.rows):
        await asyncio.sleep(0.001)
    with pytest.raises(OverloadedError):
        await Exchange(first, CHAT).task
    assert refusals(first) == {("queue_requests",): 1}
    for exchange in waiting:
        await by_leaving(exchange)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "MAX_BACKGROUND", 0)
        with pytest.raises(EngineDownError):
            await Exchange(first, "/v1/responses", background=True).task
    assert refusals(first) == {("queue_requests",): 1, ("overloaded",): 1}
    for row in first.rows:
        await row.client.stop()
        closed(row)


def refusals(state: ServerState) -> dict[tuple[str, ...], float]:
    """Requests that all models of a server have refused for load, by reason."""
    total: dict[tuple[str, ...], float] = {}
    for row in state.rows:
        for labels, count in row.telemetry.registry.values["admission_rejections"].items():
            if count:
                total[labels] = total.get(labels, 0) + count
    return total


@pytest.mark.parametrize("method", ["opening", "chunk", "ending", "whole"])
async def test_a_bug_of_ours_closes_too(
    state: ServerState, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(ChatDialect, method, bug)
    await state.rows[0].client.start()
    exchange = Exchange(state, CHAT, stream=method != "whole")
    with pytest.raises(ZeroDivisionError):
        await exchange.task
    if method in ("opening", "chunk"):
        assert exchange.status == 500 and b"internal_error" in exchange.data
    closed(state.rows[0])


async def test_in_the_background_the_task_owns_it(state: ServerState) -> None:
    """The request is answered at once; what it holds is held until its task has ended."""
    exchange = Exchange(state, "/v1/responses", background=True)
    await exchange.task
    assert exchange.status == 200 and state.rows[0].admission.num_admitted == 1
    await state.rows[0].client.start()
    await asyncio.gather(*state.responses.tasks)
    (timeline,) = state.rows[0].telemetry.finished
    assert timeline.ended is not None and timeline.ended.outcome == "ok"
    closed(state.rows[0])


@pytest.mark.parametrize("begins", [False, True])
async def test_a_background_task_that_is_cancelled_closes_it(
    state: ServerState, begins: bool
) -> None:
    """Also before its first line has run."""
    exchange = Exchange(state, "/v1/responses", background=True)
    while not state.responses.tasks:
        await asyncio.sleep(0)
    (task,) = state.responses.tasks
    if begins:
        while not state.rows[0].telemetry.live:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await exchange.task
    closed(state.rows[0])
    assert state.keyring.anonymous.meter.num_running == 0


async def test_a_generation_request_is_frozen(state: ServerState) -> None:
    seen = []

    async def look(session: sessions.Session) -> None:
        seen.append(session.request)
        for name in ("stream", "prompts", "service_class"):
            with pytest.raises(AttributeError, match="immutable"):
                setattr(session.request, name, None)

    row = ROWS[CHAT]
    ROWS[CHAT] = GenerationRow(
        path=row.path,
        body_spec=row.body_spec,
        prepare=row.prepare,
        id_prefix=row.id_prefix,
        respond=look,
    )
    try:
        await Exchange(state, CHAT).task
    finally:
        ROWS[CHAT] = row
    assert len(seen) == 1
    closed(state.rows[0])
