"""One user holds every slot of a real server, and another one asks: nobody starves, none is lost.

Nothing is timed: B's answer has to come before the first of A's ends, which takes 4.8 s at least.
"""

import asyncio
from typing import Any

import aiohttp
import pytest
from live_server import NO_TORCH, LiveServer, wait_until

from conftest import StartServer

A, B = "hw-the-first-user", "hw-the-second-user"
TOKENS, ROWS = 480, 4
STREAM = {"model": "tiny", "stream": True, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def crowded(start_server: StartServer) -> LiveServer:
    """A server of four slots and two keys."""
    keys = (f"--api-key={key}" for key in (A, B))
    live = start_server(NO_TORCH, f"--max-num-seqs={ROWS}", "--served-model-name=tiny", *keys)
    live.headers["authorization"] = f"Bearer {B}"
    return live.wait_ready()


def session(live: LiveServer, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(live.url, headers={"authorization": f"Bearer {key}"})


async def post(http: aiohttp.ClientSession, **body: Any) -> aiohttp.ClientResponse:
    """An answer that has begun; nobody reads it yet."""
    answer = await http.post("/v1/completions", json={**STREAM, **body})
    assert answer.status == 200, await answer.text()
    return answer


@pytest.mark.parametrize("case", ["streams", "wide"])
async def test_a_short_request_does_not_wait_for_the_streams_of_another(
    crowded: LiveServer, case: str
) -> None:
    """Of A's answers some are read at once and some by nobody until B has been served three times;
    each has all of its tokens in the end."""
    async with session(crowded, A) as first, session(crowded, B) as second:
        if case == "streams":
            bodies = [{"prompt": [9 + n, 5], "max_tokens": TOKENS} for n in range(2 * ROWS)]
        else:
            bodies = [{"prompt": [[9 + n, 5] for n in range(4)], "n": 4, "max_tokens": TOKENS}]
        asked = [asyncio.create_task(post(first, **body)) for body in bodies]
        await asyncio.to_thread(wait_until, lambda: running(crowded) == ROWS)
        for _ in range(3):
            own = await post(second, prompt=[7, 7], max_tokens=2, service_class="interactive")
            assert b"[DONE]" in await own.read()
            done = crowded.metric("request_success_total", finished_reason="length")
            assert done <= 3, "one of A's ended before B was served"
        texts = [await (await answer).text() for answer in asked]
    assert sum(text.count('"finish_reason":"length"') for text in texts) in (8, 16)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert crowded.metric("num_preemptions_total") >= 1
    await asyncio.to_thread(wait_until, crowded.idle)


def running(live: LiveServer) -> float:
    return live.metric("num_requests_running")
