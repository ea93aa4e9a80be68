"""Who answers when a server is full: an upstream that answers, refuses, breaks off or is gone."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from aiohttp import web

from fallback_cases import BODY, CHAT, EVENTS, Full
from headway.core.errors import UsageError
from headway.edge.upstream import FallbackUpstream, split_name
from in_process import InProcess


class Elsewhere:
    """A server of another make: what it was asked, and how it behaves."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.status, self.breaks = 200, False
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}, {"id": "small"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((dict(request.headers), body))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if not body.get("stream"):
            return web.json_response({"model": body["model"], "choices": []})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        if self.breaks:
            request.transport.close()
            return response
        await response.write(EVENTS[1])
        return response

    async def serve(self, started: threading.Event, end: threading.Event) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        for path in (CHAT, "/v1/messages"):
            app.router.add_post(path, self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set()
        while not end.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()


@pytest.fixture(scope="module")
def running() -> Iterator[Elsewhere]:
    elsewhere, started, end = Elsewhere(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(elsewhere.serve(started, end)))
    thread.start()
    started.wait(60)
    yield elsewhere
    end.set()
    thread.join(60)


@pytest.fixture
def elsewhere(running: Elsewhere) -> Elsewhere:
    running.asked.clear()
    running.status, running.breaks = 200, False
    return running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    opened = InProcess(tmp_path_factory.mktemp("full"), max_queue=1, fallback_late=True)
    yield opened
    opened.close()


@pytest.fixture
def full(server: InProcess) -> Iterator[Full]:
    house = Full(server)
    house.fill()
    yield house
    for ticket in house.tickets:
        ticket.close()
    upstream, server.state.upstream = server.state.upstream, None
    if upstream is not None:
        asyncio.run_coroutine_threadsafe(upstream.close(), server.loop).result(60)


def test_it_answers_in_its_own_words(full: Full, elsewhere: Elsewhere) -> None:
    full.server.state.upstream = FallbackUpstream(elsewhere.url + "/", key="sesame")
    before = full.count("fallback_requests", "queue")
    whole, streamed = full.post(), full.post(stream=True)
    assert whole.json() == {"model": "big", "choices": []}, "its first, for it has no tiny"
    assert streamed.content == b"".join(EVENTS)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    for answer in (whole, streamed):
        assert answer.status_code == 200
        assert answer.headers["x-headway-fallback"] == "big; reason=queue"
        assert "x-request-id" in answer.headers
    for _ in range(500):  # it is counted when the answer has ended, and we may be ahead
        if full.count("fallback_requests", "queue") == before + 2:
            break
        time.sleep(0.01)
    assert full.count("fallback_requests", "queue") == before + 2
    headers, body = elsewhere.asked[0]
    assert headers["Authorization"] == "Bearer sesame"
    assert body == {**{k: BODY[k] for k in ("messages", "max_tokens", "top_k")}, "model": "big"}


def test_it_is_asked_only_when_there_is_no_room(full: Full, elsewhere: Elsewhere) -> None:
    full.server.state.upstream = FallbackUpstream(elsewhere.url)
    full.tickets.pop().close()
    answer = full.post()
    assert answer.json()["model"] == "tiny"
    assert "x-headway-fallback" not in answer.headers
    assert not elsewhere.asked


@pytest.mark.parametrize("trouble", [400, 429, 500, "gone", "deaf"])
def test_where_it_fails_the_refusal_stands(
    full: Full, elsewhere: Elsewhere, trouble: int | str
) -> None:
    url = {"gone": "http://127.0.0.1:9/v1", "deaf": elsewhere.url + "/nothing"}
    full.server.state.upstream = FallbackUpstream(url.get(str(trouble), elsewhere.url), "small")
    elsewhere.status = trouble if isinstance(trouble, int) else 200
    before = full.count("admission_rejections", "queue_requests")
    answer = full.post(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-headway-fallback" not in answer.headers
    assert full.count("admission_rejections", "queue_requests") == before + 1


def test_a_stream_that_breaks_off_there_does_not_end_silently(
    full: Full, elsewhere: Elsewhere
) -> None:
    full.server.state.upstream = FallbackUpstream(elsewhere.url, "small")
    elsewhere.breaks = True
    answer = full.post(stream=True)
    assert answer.content.startswith(EVENTS[0])
    assert b'"code":"fallback_failed"' in answer.content and b"[DONE]" not in answer.content
    answer = full.post("/v1/messages", stream=True)
    assert b"event: error" in answer.content


def test_what_is_known_here_alone_does_not_go_elsewhere(full: Full, elsewhere: Elsewhere) -> None:
    full.server.state.upstream = FallbackUpstream(elsewhere.url, "small")
    answer = requests.post(
        full.server.url + "/v1/responses", json={"model": "tiny", "input": "hello"}, timeout=60
    )
    assert (answer.status_code, elsewhere.asked) == (503, [])


def test_what_would_be_late_goes_elsewhere_and_comes_back_when_that_fails(
    full: Full, elsewhere: Elsewhere
) -> None:
    """The queue has room, but a prompt of 1,000,000 tokens is before this one."""
    forecast = full.model.admission.queues.by_engine[0].forecast
    (ticket,) = full.tickets
    full.model.admission.rules = type(full.model.admission.rules)(max_queue_wait_s=1e9)
    forecast.set_prompts(ticket.entry, [1_000_000])
    ticket.entry.due_s = forecast.clock.now_s() + 1.0
    full.post()  # something to learn a rate from
    forecast._told_s, learn = 1.0, forecast.on_record
    forecast.on_record = lambda record: None  # type: ignore[method-assign]
    full.server.state.upstream = FallbackUpstream(elsewhere.url, "small")
    try:
        answer = full.post(slo={"ttft_ms": 2000})
        assert answer.headers["x-headway-fallback"] == "small; reason=late"
        elsewhere.status = 500
        answer = full.post(slo={"ttft_ms": 2000})
        assert answer.status_code == 200 and answer.json()["model"] == "tiny"
    finally:
        forecast.on_record, forecast._told_s = learn, 0.0  # type: ignore[method-assign]
        full.model.admission.rules = type(full.model.admission.rules)(max_queue=1)
    full.model.admission.check_integrity()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("big=http://host/v1", ("big", "http://host/v1")),
        ("http://host/v1?a=b", ("", "http://host/v1?a=b")),
        ("org/big", ("", "org/big")),
        ("small=models/s", ("small", "models/s")),
    ],
)
def test_a_fallback_may_have_a_name(text: str, parts: tuple[str, str]) -> None:
    assert split_name(text) == parts


def test_a_name_wants_a_place() -> None:
    with pytest.raises(UsageError, match="no name and place"):
        split_name("big=")


async def test_closing_twice_is_safe() -> None:
    upstream = FallbackUpstream("http://127.0.0.1:9/v1")
    upstream._http()
    await upstream.close()
    await upstream.close()
