"""What a batch costs the others: `python benchmarks/batch_beside.py FOLDER`.

Interactive requests come at random (Poisson) to a real server, alone and beside a batch, in turns,
so that a change of the machine's mood falls on both. Printed are the percentiles of the time to the
first token, the ratio of the 99th with a bootstrap interval, and the batch's lines per second.
Then a batch of `--lines` runs to its end with the server killed twice, and each line is counted.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from common import free_port, serve_command, wait_until_ready

RESAMPLES = 2000


def lines_of(count: int, model: str, max_tokens: int) -> bytes:
    """A batch of completions of different prompts."""
    made = []
    for i in range(count):
        body = {"model": model, "prompt": f"Once upon a time {i} ", "max_tokens": max_tokens}
        line = {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body}
        made.append(json.dumps(line))
    return "\n".join(made).encode()


class Server:
    """A `headway serve` on a data folder of its own; `kill` and `start` again as often as liked."""

    def __init__(self, folder: Path, data: str, flags: list[str]) -> None:
        port = free_port()
        self.command = serve_command(folder, f"--port={port}", f"--data-dir={data}", *flags)
        self.url = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(self.url, self.process)
        except ChildProcessError as error:
            raise SystemExit(str(error)) from None

    def end(self, number: int) -> None:
        os.kill(self.process.pid, number)
        self.process.wait()


async def begin(http: aiohttp.ClientSession, lines: bytes) -> str:
    """Upload a batch and start it."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", lines, filename="in.jsonl")
    async with http.post("/v1/files", data=form) as answer:
        file_id = (await answer.json())["id"]
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    async with http.post("/v1/batches", json=body) as answer:
        return (await answer.json())["id"]


async def look(http: aiohttp.ClientSession, batch_id: str) -> dict[str, Any]:
    async with http.get(f"/v1/batches/{batch_id}") as answer:
        found: dict[str, Any] = await answer.json()
        return found


@asynccontextmanager
async def beside(
    http: aiohttp.ClientSession, lines: bytes, speeds: list[float]
) -> AsyncIterator[None]:
    """A batch runs while the block does; then it is cancelled and its speed noted."""
    batch_id = await begin(http, lines)
    while (await look(http, batch_id))["status"] == "validating":
        await asyncio.sleep(0.05)
    begun_s = time.perf_counter()
    yield
    batch = await look(http, batch_id)
    speeds.append(batch["request_counts"]["completed"] / (time.perf_counter() - begun_s))
    if batch["status"] == "completed":
        print("  the batch was over before the turn was: give more --lines", file=sys.stderr)
        return
    async with http.post(f"/v1/batches/{batch_id}/cancel"):
        pass
    while (await look(http, batch_id))["status"] != "cancelled":
        await asyncio.sleep(0.05)


async def one(http: aiohttp.ClientSession, model: str, tokens: int, found: list[float]) -> None:
    """One streamed request; notes the seconds to its first token."""
    body = {
        "model": model,
        "prompt": f"There was a girl named {random.random()}",
        "max_tokens": tokens,
        "stream": True,
    }
    begun_s = time.perf_counter()
    async with http.post("/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b'data: {"id"'):
                found.append(time.perf_counter() - begun_s)
                break
        async for _ in answer.content:
            pass


async def turn(http: aiohttp.ClientSession, model: str, given: argparse.Namespace) -> list[float]:
    """Seconds to the first token of each request of one turn."""
    found: list[float] = []
    end_s = time.perf_counter() + given.seconds
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() < end_s:
            group.create_task(one(http, model, given.tokens, found))
            await asyncio.sleep(random.expovariate(given.rate))
    return found


def ratio_interval(alone: np.ndarray, with_batch: np.ndarray) -> tuple[float, float]:
    """95% of the bootstrapped ratios of the 99th percentiles."""
    draw = np.random.default_rng(0)
    ratios = [
        np.percentile(draw.choice(with_batch, len(with_batch)), 99)
        / np.percentile(draw.choice(alone, len(alone)), 99)
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


async def compare(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    """Turns alone and beside a batch."""
    alone: list[float] = []
    with_batch: list[float] = []
    speeds: list[float] = []
    server.start()
    async with aiohttp.ClientSession(server.url) as http:
        async with http.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        lines = lines_of(given.lines, model, given.tokens)
        await turn(http, model, argparse.Namespace(**{**vars(given), "seconds": 3}))
        for _ in range(given.rounds):
            alone += await turn(http, model, given)
            async with beside(http, lines, speeds):
                with_batch += await turn(http, model, given)
    server.end(signal.SIGTERM)
    quiet, busy = np.array(alone), np.array(with_batch)
    told = {
        name: {f"p{p}_ms": round(1e3 * float(np.percentile(values, p)), 2) for p in (50, 95, 99)}
        for name, values in (("alone", quiet), ("beside", busy))
    }
    low, high = ratio_interval(quiet, busy)
    ratio = told["beside"]["p99_ms"] / told["alone"]["p99_ms"]
    return {
        **told,
        "requests": [len(quiet), len(busy)],
        "p99_ratio": round(ratio, 3),
        "p99_ratio_95": [round(low, 3), round(high, 3)],
        "batch_lines_per_s": round(float(np.mean(speeds)), 1),
    }


async def survive(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    """A whole batch with two kills."""
    batch_id, begun_s = "", time.perf_counter()
    for share in (1 / 3, 2 / 3, None):
        server.start()
        async with aiohttp.ClientSession(server.url) as http:
            if not batch_id:
                async with http.get("/v1/models") as answer:
                    model = (await answer.json())["data"][0]["id"]
                batch_id = await begin(http, lines_of(given.lines, model, given.tokens))
            wanted = given.lines * (share or 1)
            while (batch := await look(http, batch_id))["request_counts"]["completed"] < wanted:
                await asyncio.sleep(0.1)
            while share is None and batch["status"] != "completed":
                await asyncio.sleep(0.1)
                batch = await look(http, batch_id)
            if share is None:
                async with http.get(f"/v1/files/{batch['output_file_id']}/content") as answer:
                    written = (await answer.read()).splitlines()
        server.end(signal.SIGTERM if share is None else signal.SIGKILL)
    names = {json.loads(line)["custom_id"] for line in written}
    return {
        "lines": given.lines,
        "results": len(written),
        "custom_ids": len(names),
        "seconds": round(time.perf_counter() - begun_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=5.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="one turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--only-turns", action="store_true", help="no batch that is killed")
    parser.add_argument("--flags", default="", help="more flags of the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        server = Server(given.folder, data, given.flags.split())
        print(json.dumps(asyncio.run(compare(server, given))), flush=True)
        if not given.only_turns:
            print(json.dumps(asyncio.run(survive(server, given))))


if __name__ == "__main__":
    main()
