"""Requests whose clients leave at any moment, by the hundred: nothing of them stays behind."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import wait_until

from in_process import InProcess

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Once upon a time"] * 3, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who are you?"}]},
    "/v1/responses": {"input": "Who are you?", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Who are you?"}]},
}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[InProcess]:
    opened = InProcess(tmp_path, max_queue=100_000, max_queue_wait=36_000.0)
    admission = opened.state.rows[0].admission  # on a slow machine each of these prompts is long
    admission.rules = replace(admission.rules, max_long_queue=100_000)
    yield opened
    opened.close()


async def leave(http: aiohttp.ClientSession, source: random.Random, number: int) -> None:
    """Ask, streamed or whole, and go: before the headers, after them, or in mid-answer."""
    path, body = source.choice(list(PATHS.items()))
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**body, "model": "tiny", length: 200, "stream": number % 3 > 0}
    async with asyncio.timeout(source.choice((0.001, 0.01, 0.05, 0.2))):
        async with http.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()


async def storm(house: InProcess, count: int) -> int:
    """How many of `count` requests, a hundred at a time, ended before their client left."""
    source, crowd, ended = random.Random(5), asyncio.Semaphore(100), 0

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal ended
        async with crowd:
            with contextlib.suppress(TimeoutError):  # the client has left, as it is to
                await leave(http, source, number)
                ended += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(house.url, connector=connector) as http:
        await asyncio.gather(*(one(http, number) for number in range(count)))
    return ended


@pytest.mark.parametrize(
    "count", [pytest.param(400), pytest.param(10_000, marks=pytest.mark.hardening)]
)
async def test_what_cancelled_requests_held_is_free(house: InProcess, count: int) -> None:
    """Slots, blocks, streams, tickets and meters; and the next request is served."""
    model = house.state.rows[0]
    engine, client, admission = model.client.engine, model.client, model.admission
    assert await storm(house, count) < count / 2

    def is_clean() -> bool:
        meters = [meter.num_running for meter in admission._meters.values()]
        held = (engine.num_requests, engine.kv.num_used, engine.scheduler.num_waiting)
        live = (
            len(client._streams),
            len(admission.queues.by_engine[0].forecast.entries),
            model.telemetry.num_live,
        )
        return not (any(held) or any(live) or any(meters) or engine.scheduler.running)

    await asyncio.to_thread(wait_until, is_clean)
    assert not admission.queues.by_engine[0].forecast._by_engine
    engine.check_integrity()
    async with aiohttp.ClientSession(house.url) as http:
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
        async with http.post("/v1/completions", json=body) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 3
