"""Five times the load of a real server, with and without objectives asked for.

Requests without an objective are queued for as long as `--max-queue-wait` says and refused at once
beyond it; those with one are refused at once where it cannot be met. None is refused after waiting.
"""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer

from conftest import StartServer

pytestmark = pytest.mark.hardening

WAIT_S, OBJECTIVE_S, LOAD_S, TIMES = 4.0, 0.5, 10.0, 5.0
REFUSAL_S = 0.5
"""On two cores that both the server and the clients keep busy."""
BODY = {"prompt": [20, 30, 40] * 8, "max_tokens": 128, "ignore_eos": True, "stream": True}


@dataclass
class Exchange:
    """One request: its status, seconds until its first token or refusal, and whether it ended."""

    status: int
    answered_s: float
    is_complete: bool


async def exchange(http: aiohttp.ClientSession, body: dict[str, Any]) -> Exchange:
    began_s = time.monotonic()
    async with http.post("/v1/completions", json=body) as answer:
        first = await answer.content.readuntil(b"\n") if answer.status == 200 else b""
        while first.startswith((b":", b"\n")):  # a ping shows no token
            first = await answer.content.readuntil(b"\n")
        answered_s = time.monotonic() - began_s
        rest = await answer.read()
        assert answer.status == 200 or "retry-after" in answer.headers
        return Exchange(answer.status, answered_s, rest.endswith(b"data: [DONE]\n\n"))


async def capacity(http: aiohttp.ClientSession, body: dict[str, Any]) -> float:
    """Return the requests a second of four clients, after a round of warm-up."""
    rates = []
    for _ in range(2):
        began_s = time.monotonic()
        for _ in range(3):
            await asyncio.gather(*(exchange(http, body) for _ in range(4)))
        rates.append(12 / (time.monotonic() - began_s))
    return rates[-1]


async def overload(live: LiveServer, **more: Any) -> list[Exchange]:
    """Send `TIMES` the capacity for `LOAD_S` seconds in an open loop."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(live.url, connector=connector) as http:
        body = {**BODY, "model": live.model}
        rate = TIMES * await capacity(http, body)
        began_s, tasks = time.monotonic(), []
        for number in range(int(rate * LOAD_S)):
            await asyncio.sleep(began_s + number / rate - time.monotonic())
            tasks.append(asyncio.create_task(exchange(http, {**body, **more})))
        return await asyncio.gather(*tasks)


def percentiles(times_s: list[float]) -> str:
    cut = quantiles(times_s, n=100)
    return f"p50 {cut[49]:.3f} p95 {cut[94]:.3f} p99 {cut[98]:.3f} worst {max(times_s):.3f}"


def check(found: list[Exchange], wait_s: float) -> None:
    """All served requests are whole and began within the wait; all refusals came at once."""
    served = [each for each in found if each.status == 200]
    refused = [each.answered_s for each in found if each.status == 503]
    times_s = [each.answered_s for each in served]
    print(
        f"\n{len(served)} served, first token {percentiles(times_s)}; {len(refused)} refused",
        end="",
    )
    print(f", after {percentiles(refused)}" if refused else "")
    assert len(served) + len(refused) == len(found)
    assert all(each.is_complete for each in served)
    assert refused and max(refused) < wait_s and quantiles(refused, n=100)[94] < REFUSAL_S
    assert quantiles(times_s, n=100)[94] < 1.25 * wait_s


async def test_requests_without_an_objective_are_queued(start_server: StartServer) -> None:
    live = start_server(f"--max-queue-wait={WAIT_S}s", "--max-queue=10000", "--max-num-seqs=2")
    found = await overload(live.wait_ready())
    check(found, WAIT_S)
    served = [each.answered_s for each in found if each.status == 200]
    assert max(served) > WAIT_S / 2, "they were not queued"


async def test_requests_with_an_objective_are_refused_at_once(start_server: StartServer) -> None:
    live = start_server("--max-queue=10000", "--max-num-seqs=2")
    check(await overload(live.wait_ready(), slo={"ttft": f"{OBJECTIVE_S}s"}), OBJECTIVE_S)


async def test_short_requests_at_once_on_a_busy_machine_are_served() -> None:
    """24 at once, and 60 one after the other: no 503, and the README's answer each time."""
    live = LiveServer(None).wait_ready()
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "model": live.model}
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(live.url, connector=connector) as http:

            async def ask() -> tuple[int, str]:
                async with http.post("/v1/chat/completions", json=body) as answer:
                    found = await answer.json()
                    return answer.status, found["choices"][0]["message"]["content"]

            answers = await asyncio.gather(*(ask() for _ in range(24)))
            answers += [await ask() for _ in range(60)]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        live.close()
    assert set(answers) == {(200, "2 + 3 = 5.")}
