"""Prompts and answers in different engines of a real server: the tokens of one, also when the
engine of either side is killed.

In float32, so that a token that is computed again in another batch is the same to the last bit.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from live_server import LiveServer, engines, headway, started_at, wait_until

PROMPT = [10 + number * 7 % 300 for number in range(400)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 3, "ignore_eos": True}
LETTERS: dict[str, Any] = {"temperature": 0.7, "seed": 4}
LETTERS["structured_outputs"] = {"regex": "[a-z ]{600}"}
ROLES = ("--prefill-replicas=1", "--decode-replicas=1")
SHAPE = ("--dtype=float32", "--kv-memory=64MiB", "--threads=1", "--engine-timeout=10m")


@pytest.fixture(scope="module")
def pools() -> Iterator[LiveServer]:
    server = LiveServer(None, *ROLES, *SHAPE)
    yield both_ready(server.wait_ready())
    server.close()


@pytest.fixture(scope="module")
def pid_of(pools: LiveServer) -> dict[str, int]:
    """The process of each role's engine: the first that was started prefills."""
    found = sorted(engines(pools.pid), key=lambda pid: (started_at(pid), pid))
    return dict(zip(["prefill", "decode"], found, strict=True))


def both_ready(server: LiveServer) -> LiveServer:
    wait_until(lambda: all(each["ready"] for each in stats(server)["engines"]))
    return server


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[list[int]]]:
    """The answers of one engine alone."""
    server = LiveServer(None, *SHAPE).wait_ready()
    yield asyncio.run(answers(server, []))
    server.close()


def stats(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(server.get("/stats")[1])
    return found


async def answers(server: LiveServer, came: list[list[int]]) -> list[list[int]]:
    """The tokens of a greedy, a seeded and a structured stream, which `came` gains as they come."""
    more = {"model": server.model, "max_tokens": 250, "return_token_ids": True, "stream": True}
    bodies = [
        {"prompt": [200 + at, *PROMPT], **how, **more}
        for at, how in enumerate([GREEDY, SEEDED, LETTERS])
    ]
    came += [[] for _ in bodies]
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(None)) as http:
        await asyncio.gather(*map(stream, [http] * 3, bodies, came))
    return came


async def stream(http: aiohttp.ClientSession, body: dict[str, Any], tokens: list[int]) -> None:
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids", [])


async def test_an_answer_goes_on_in_the_other_engine(pools, undisturbed):
    before = stats(pools)["totals"]["handovers"].get("taken", 0)
    assert await answers(pools, []) == undisturbed
    told = stats(pools)
    assert [each["role"] for each in told["engines"]] == ["prefill", "decode"]
    assert told["totals"]["handovers"]["taken"] == before + 3
    assert pools.metric("kv_handovers_total", outcome="taken") == before + 3
    assert pools.metric("kv_handover_seconds_count") == before + 3
    assert pools.metric("engines", role="prefill") == pools.metric("engines", role="decode") == 1
    brought = pools.metric("prompt_tokens_cached_by_source_total", source="engine")
    assert brought >= 16, "no block came from the other engine"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_is_killed_costs_no_token(pools, undisturbed, pid_of, role):
    await asyncio.to_thread(pools.post, "/cache/forget", {})
    came: list[list[int]] = []
    under_way = asyncio.create_task(answers(pools, came))
    wanted = 1 if role == "prefill" else 40
    while len(came) < 3 or max(map(len, came)) < wanted:
        assert not under_way.done(), under_way.exception()
        await asyncio.sleep(0.01)
    os.kill(pid_of[role], signal.SIGKILL)
    await under_way
    assert came == undisturbed
    wait_until(lambda: pools.metric("engine_restarts_total") == 1 + (role == "decode"))
    both_ready(pools)
    (pid_of[role],) = set(engines(pools.pid)) - set(pid_of.values())
    wait_until(pools.idle)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--prefill-replicas=1"], "--decode-replicas 1"),
        (["--decode-replicas=2"], "--prefill-replicas 1"),
        ([*ROLES, "--replicas=3"], "Leave --replicas out"),
        ([*ROLES, "--no-prefix-cache"], "Leave out --no-prefix-cache"),
        ([*ROLES, "--executor=null"], "or use --replicas"),
    ],
)
def test_what_does_not_fit_is_refused(flags, why):
    done = headway("serve", "--port=0", "--threads=1", *flags)
    assert done.returncode != 0 and why in done.stderr
