"""Upstreams that send without end: they are cut off, another answers, the loop goes on turning."""

import asyncio

import aiohttp
import pytest

from gateway_world import Stub, config_of, gateway, text_of, world
from headway.gateway import events
from headway.gateway.events import SLICE_BYTES, EventCutter, RelayEventReader
from headway.gateway.upstream import Upstream
from raw_upstream import raw_upstream

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
LIMIT = 2**26 - 2**20
"""Below what a whole stream may have."""
MODELS = ({"name": "tiny", "policy": "round_robin", "upstreams": ["bad", "good"]},)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 4000),
        (SSE, b":\n\n" * 20_000),
        (SSE, b"\n\n" * 20_000),
        (SSE, b'data: {"id":"x","choices":[]}\n\n' * 2000),
    ],
    ids=["informational", "comments", "blank lines", "empty events"],
)
async def test_another_upstream_answers_where_one_shows_nothing_without_end(
    first: bytes, again: bytes
) -> None:
    good = Stub("good")
    with raw_upstream(first, again, LIMIT) as upstream:
        bad = Stub("bad")
        bad.url = upstream.url
        await good.start()
        async with gateway(config_of([bad, good], *MODELS)) as live:
            answers = [await live.chat() for _ in range(2)]
        await good.stop()
    assert [answer.text for answer in answers] == [text_of(8)] * 2
    assert upstream.num_asked == 1 and upstream.num_sent < LIMIT


async def test_a_stream_that_stops_showing_anything_ends_with_an_error() -> None:
    with raw_upstream(SSE + TOKEN, b": still here\n\n" * 4000, LIMIT) as upstream:
        bad = Stub("bad")
        bad.url = upstream.url
        async with gateway(config_of([bad], {"name": "tiny"})) as live:
            answer = await live.chat()
    assert answer.data.count(b'data: {"error"') == 1 and upstream.num_sent < LIMIT


def content(data: bytes) -> aiohttp.StreamReader:
    """A body of which all bytes have come."""

    class Protocol:
        _reading_paused = False

        def resume_reading(self, resume_parser: bool = True) -> None: ...
        def pause_reading(self) -> None: ...

    reader = aiohttp.StreamReader(Protocol(), 2**26, loop=asyncio.get_running_loop())  # type: ignore[arg-type]
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_others_have_a_turn_between_slices_of_events() -> None:
    data = TOKEN * 5000
    reader, turns, count = RelayEventReader(content(data), 2**26), 0, 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(others())
    while (found := await reader.read()) is not None:
        count += len(found)
        reader.note_content()
    counting.cancel()
    assert count == 5000 and turns >= len(data) // SLICE_BYTES


async def test_pings_without_content_end_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_IDLE_S", 0.0)
    reader = RelayEventReader(content(TOKEN + b": ping\n\n" * 3000), 2**26)
    assert await reader.read()
    reader.note_content()
    with pytest.raises(ValueError, match="shows nothing"):
        await reader.read()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    text = b"event: a\r\ndata: 1\r\n\r\n: c\r\n\r\ndata: 2\n\ndata: 3\rdata: 4\r\rdata: 5\n\n" * 3
    cutter, found = EventCutter(), []
    for at in range(0, len(text), size):
        found += cutter.feed(text[at : at + size])
    assert [each.data or each.comment for each in found] == [b"1", b": c", b"2", b"3 4", b"5"] * 3
    assert cutter.num_parts == 15


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_byte_order_mark_is_no_part_of_the_first_event(size: int) -> None:
    text, found = b"\xef\xbb\xbfdata: 1\n\ndata: \xef\xbb\xbf2\n\n", []
    cutter = EventCutter()
    for at in range(0, len(text), size):
        found += cutter.feed(text[at : at + size])
    assert [each.data for each in found] == [b"1", b"\xef\xbb\xbf2"]


DEEP = b'{"x":' + b"[" * 300_000 + b"]" * 300_000 + b"}"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


async def test_an_upstream_whose_models_are_too_deep_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.gateway.upstream.HEALTH_CHECK_S", 0.01)
    with raw_upstream(b"") as upstream:
        upstream.models = DEEP
        row = Stub("bad")
        row.url = upstream.url
        async with gateway(config_of([row], {"name": "tiny"})) as live:
            found = live.state.upstreams["bad"]
            async with asyncio.timeout(30):
                while not found.is_down:
                    await asyncio.sleep(0.01)
                upstream.models = b'{"data": [{"id": "tiny"}]}'
                while found.is_down:
                    await asyncio.sleep(0.01)
            assert found.served == ("tiny",)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_too_deep_is_asked_elsewhere(stream: bool) -> None:
    good = Stub("good")
    deep = SSE + b"data: " + DEEP + b"\n\n" if stream else JSON % (len(DEEP), DEEP)
    with raw_upstream(deep) as upstream:
        bad = Stub("bad")
        bad.url = upstream.url
        await good.start()
        async with gateway(config_of([bad, good], *MODELS)) as live:
            answers = [await live.chat(stream) for _ in range(2)]
            failed = live.state.metrics.of("attempts", upstream="bad", outcome="lied")
        await good.stop()
    assert [answer.text for answer in answers] == [text_of(8)] * 2 and failed == 1


async def test_a_watcher_that_fails_is_counted_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a look raises: the metric names the task, and the next look comes."""
    monkeypatch.setattr("headway.core.supervision.FIRST_PAUSE_S", 0.01)
    stub = Stub("a")
    async with world(stub) as live:
        upstream, num_looks, look = live.state.upstreams["a"], 0, Upstream.check_health

        async def failing(self: Upstream) -> None:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 1:
                raise KeyError("a fault of ours")
            await look(self)

        monkeypatch.setattr(Upstream, "check_health", failing)
        monkeypatch.setattr("headway.gateway.upstream.HEALTH_CHECK_S", 0.01)
        await upstream.close()
        upstream.start()
        async with asyncio.timeout(30):
            while num_looks < 3:
                await asyncio.sleep(0.01)
        text = live.state.metrics.render(live.state.gauges()).decode()
    assert 'headway_gateway:task_failures_total{task="upstream watch"}' in text
