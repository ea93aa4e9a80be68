"""The gateway ends: what outlasts the drain gets an error, and what is new is refused."""

import asyncio
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest
from live_gateway import LiveGateway
from live_server import wait_until

from gateway_world import Stub

MESSAGES = [{"role": "user", "content": "Tell me of rivers."}]


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    """An upstream whose streams stop behind two tokens, and whose whole answers never come."""
    found = Stub("a", fault=lambda number: "hush2" if number <= 3 else "stall")
    await found.start()
    yield found
    await found.stop()


async def test_what_outlasts_the_drain_ends_with_an_error(stub: Stub) -> None:
    flags = ("--drain-timeout=3",)
    live = await asyncio.to_thread(LiveGateway, stub.url.removesuffix("/v1"), flags=flags)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8}
    try:
        async with aiohttp.ClientSession(live.url) as http:

            async def ask(path: str = "/v1/chat/completions", **more: object) -> bytes:
                async with http.post(path, json={**body, **more}) as answer:
                    return await answer.read()

            streams = [asyncio.create_task(ask(stream=True)) for _ in range(3)]
            while len(stub.asked) < 3:
                await asyncio.sleep(0.01)
            whole = asyncio.create_task(ask())
            while len(stub.asked) < 4:
                await asyncio.sleep(0.01)
            live.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: live.get("/ready")[0] == 503)
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
                assert (await answer.json())["error"]["code"] == "shutting_down"
            async with http.post("/v1/messages", json=body) as answer:
                assert (await answer.json())["error"]["type"] == "overloaded_error"
            async with http.get("/health") as answer:
                assert answer.status == 200
            for data in await asyncio.gather(*streams):
                assert b"t1" in data and data.count(b'data: {"error"') == 1, data
                assert b"shutting_down" in data and b"[DONE]" not in data
            assert b"shutting_down" in await whole
        assert len(stub.asked) == 4, "what came behind the signal was refused"
        assert await asyncio.to_thread(live.process.wait, 60) == 0
        statuses = live.rows("SELECT status FROM requests ORDER BY status")
        assert statuses == [("shutting_down",)] * 4
        assert "Traceback" not in live.stderr, live.stderr
    finally:
        await asyncio.to_thread(live.close)
