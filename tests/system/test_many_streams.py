"""Hundreds of streams at once, some of them dropped: the others get every token, nothing leaks."""

import asyncio
import random
from typing import Any

import aiohttp
import openai
from live_server import LiveServer, wait_until

from conftest import StartServer

NUM_STREAMS = 200


async def stream(client: openai.AsyncOpenAI, index: int, drop_after: int | None) -> int:
    """Read one stream, or leave it after some chunks; returns the tokens usage tells, or -1.

    Those that are left are long: however many tokens come in a chunk, they do not end before.
    """
    wanted = 10 + index % 50 if drop_after is None else 400
    chunks = await client.completions.create(
        model="tiny",
        prompt=[5 + index, 7, 9] * (1 + index % 20),
        max_tokens=wanted,
        n=1 + index % 3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    seen = 0
    async with chunks:
        async for count, chunk in enumerate_async(chunks):
            if drop_after is not None and count >= drop_after:
                return -1
            seen += sum(len(choice.token_ids or []) for choice in chunk.choices)
    assert drop_after is not None or seen == wanted * (1 + index % 3)
    assert chunk.usage is not None and chunk.usage.completion_tokens == seen
    return seen


async def enumerate_async(items: Any) -> Any:
    """enumerate for an async iterator."""
    count = 0
    async for item in items:
        yield count, item
        count += 1


async def test_dropped_streams_free_their_blocks_and_harm_no_other(server: LiveServer) -> None:
    source = random.Random(1)
    engine, tokens = server.engine_pid(), server.probe()
    drops = [source.randrange(12) if i % 3 == 0 else None for i in range(NUM_STREAMS)]
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=280.0
    ) as client:
        counts = await asyncio.gather(*(stream(client, i, drop) for i, drop in enumerate(drops)))
    for index, (drop, count) in enumerate(zip(drops, counts, strict=True)):
        assert drop is not None or count == (10 + index % 50) * (1 + index % 3)
    assert counts.count(-1) > NUM_STREAMS / 5
    await asyncio.to_thread(wait_until, server.idle)
    assert server.is_ready() and server.engine_pid() == engine
    assert server.metric("engine_restarts_total") == 0
    assert server.probe() == tokens


async def test_a_whole_answer_nobody_waits_for_is_dropped(server: LiveServer) -> None:
    aborts = server.metric("request_success_total", finished_reason="abort")
    body = {"model": "tiny", "prompt": ["hi"] * 30, "max_tokens": 500, "n": 4, "ignore_eos": True}
    async with aiohttp.ClientSession(server.url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_running") > 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.to_thread(wait_until, server.idle)
    assert server.metric("request_success_total", finished_reason="abort") > aborts


async def test_a_full_cache_preempts_and_changes_no_token(
    start_server: StartServer, server: LiveServer
) -> None:
    """50 blocks of 8 KiB hold 800 tokens; 24 sequences of up to 285 want more.

    Where a text could end an answer nobody knows how long it becomes, and who fits starts.
    """
    flags = ("--kv-memory=400KiB", "--served-model-name=tiny", "--max-queue-wait=10m")
    small = start_server(*flags).wait_ready()
    body = {"model": "tiny", "max_tokens": 100, "temperature": 0, "return_token_ids": True}
    body |= {"ignore_eos": True, "stop": ["never said"]}
    bodies = [{**body, "prompt": [3 + i] * (1 + 8 * i)} for i in range(24)]

    async def ask(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[int]:
        async with http.post("/v1/completions", json=body) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            ids: list[int] = content["choices"][0]["token_ids"]
            return ids

    async with aiohttp.ClientSession(small.url) as http:
        crowded = await asyncio.gather(*(ask(http, body) for body in bodies))
    async with aiohttp.ClientSession(server.url) as http:
        alone = [await ask(http, body) for body in bodies]
    assert crowded == alone
    assert small.metric("num_preemptions_total") > 0
    await asyncio.to_thread(wait_until, small.idle)
