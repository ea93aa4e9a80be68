"""What the gateway adds and what it saves: time, CPU, broken streams.

    python benchmarks/gateway.py overhead                   TTFT and CPU a chunk, beside none
    python benchmarks/gateway.py faults [--requests 800]    who is complete, with how many attempts
    … overhead | faults --litellm VENV/bin/litellm          the same with LiteLLM's proxy

Upstreams are stubs in a process of their own (`tests/gateway_world.py`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from common import free_port, heading, line, running, stop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

STREAMS, TOKENS, TOKEN_S, ROUNDS = 8, 200, 0.004, 9
KEY = "sk-benchmark"
"""LiteLLM's proxy does not start without a key of its own."""
MESSAGES = [{"role": "user", "content": "Tell me of rivers and of the sea."}]
FAULTS = ["close", "lie", "status503", "error_event", *(f"reset{i}" for i in range(8))]
COLUMNS = {
    "overhead": (
        *("before the stub", "TTFT p50 (ms)", "p99 (ms)"),
        "CPU a chunk (µs): least … median … most",
    ),
    "faults": ("gateway", "upstreams", "complete", "silent ends", "attempts a request", "seconds"),
}


# ── upstreams ───────────────────────────────────────────────────────────────────────────────


def stubs_main(ports: list[int], headway: bool, faulty: bool) -> None:
    """The process of the stubs: two that lie and break, one that stalls, one that is killed."""
    from gateway_world import Stub

    dice = random.Random(1)

    def often(number: int) -> str:
        return dice.choice(FAULTS) if dice.random() < 0.15 else ""

    running: set[asyncio.Future[Any]] = set()
    victims: list[Any] = []

    def acted(action: Any) -> None:
        running.add(asyncio.ensure_future(action(victims[-1])))

    async def main() -> None:
        stubs = [Stub(f"s{i}", headway=headway, token_s=TOKEN_S) for i in range(len(ports))]
        for stub, port in zip(stubs, ports, strict=True):
            stub.port = port
            await stub.start()
        if faulty:
            stubs[0].fault = stubs[1].fault = often
            stubs[2].fault = lambda number: "stall" if number % 80 == 40 else ""
        victims.append(stubs[-1])
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        for number, action in ((signal.SIGUSR1, Stub.stop), (signal.SIGUSR2, Stub.start)):
            loop.add_signal_handler(number, acted, action)
        loop.add_signal_handler(signal.SIGTERM, told.set)
        await told.wait()
        print(json.dumps(sum(len(stub.asked) for stub in stubs)), flush=True)
        os._exit(0)

    asyncio.run(main())


@contextlib.contextmanager
def stubs(count: int, *, headway: bool, faulty: bool = False) -> Iterator[tuple[list[str], Any]]:
    """(URLs, process) of so many stubs; at the end its stdout has the number of requests."""
    ports = [free_port() for _ in range(count)]
    given = {"ports": ports, "headway": headway, "faulty": faulty}
    command = [sys.executable, __file__, "stubs", "--given", json.dumps(given)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    time.sleep(2.0)
    try:
        yield [f"http://127.0.0.1:{port}/v1" for port in ports], process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


# ── gateways ────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def ours(urls: list[str], **route: Any) -> Iterator[tuple[str, int]]:
    """`headway gateway` before these: (URL, process id)."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"name": f"u{i}", "url": url} for i, url in enumerate(urls)]
        file = Path(folder) / "gateway.yaml"
        model = {"name": "tiny", **route}
        file.write_text(json.dumps({"upstreams": rows, "models": [model]}))
        flags = [f"--port={port}", f"--data-dir={folder}", "--log-level=error"]
        command = [sys.executable, "-m", "headway.cli.main", "gateway", str(file), *flags]
        with running(command, port) as started:
            yield started


@contextlib.contextmanager
def litellm(urls: list[str], program: str) -> Iterator[tuple[str, int]]:
    """LiteLLM's proxy before these, with three retries and its cooldowns."""
    port = free_port()
    rows = [
        {
            "model_name": "tiny",
            "litellm_params": {"model": "openai/tiny", "api_base": url, "api_key": "x"},
        }
        for url in urls
    ]
    settings = {"num_retries": 3, "timeout": 60, "stream_timeout": 5}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps({"model_list": rows, "router_settings": settings}))
        command = [program, "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]
        own = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=os.environ | own, **quiet)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(until_alive(url + "/health/liveliness"))
            yield url, process.pid
        finally:
            stop(process)


async def until_alive(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the threads of a process have had, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


# ── load ────────────────────────────────────────────────────────────────────────────────────


class Stream:
    """One stream as its client sees it."""

    def __init__(self) -> None:
        self.ttft_s = 0.0
        self.num_chunks = 0
        self.data = b""

    def is_complete(self, text: str) -> bool:
        """Whether all of its text came, and its end."""
        found = [
            choice["delta"].get("content") or ""
            for part in self.data.split(b"\n\n")
            if part.startswith(b"data: {")
            for choice in json.loads(part[6:]).get("choices", ())
        ]
        return "".join(found) == text and b"[DONE]" in self.data

    @property
    def ends_with_error(self) -> bool:
        return b'"error"' in self.data[-2000:]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    """One chat, streamed; what fails is told by what has come."""
    stream, began_s = Stream(), time.perf_counter()
    headers = {"authorization": f"Bearer {KEY}"}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.post(url + "/chat/completions", json=body, headers=headers) as answer:
            async for data in answer.content.iter_any():
                stream.data += data
                stream.num_chunks += data.count(b"data: {")
                if not stream.ttft_s and b'"content":"t' in stream.data.replace(b": ", b":"):
                    stream.ttft_s = time.perf_counter() - began_s
    return stream


def chat(count: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": count, "stream": True}
    return {**body, **fields}


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


# ── overhead ────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def relay(url: str) -> Iterator[tuple[str, int]]:
    """The bare relay before this: (URL, process id)."""
    port, program = free_port(), Path(__file__).with_name("bare_relay.py")
    process = subprocess.Popen([sys.executable, program, str(port), url])
    try:
        asyncio.run(until_alive(f"http://127.0.0.1:{port}/v1/models"))
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        stop(process)


Row = tuple[str, str, int | None]
"""What is measured: its name, its URL, its process."""


async def overhead(rows: list[Row]) -> list[tuple[list[float], list[float]]]:
    """For each row (seconds to the first token, CPU seconds a chunk of 8 streams), all in turns."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
    async with session() as http:
        for _, url, _ in rows:
            for _ in range(20):
                await ask(http, url, chat(1))
        for _ in range(ROUNDS):
            for (_, url, pid), (ttfts, chunks) in zip(rows, found, strict=True):
                ttfts += [(await ask(http, url, chat(1))).ttft_s for _ in range(60)]
                if not pid:
                    continue
                before_s = cpu_s(pid)
                all_of_it = (ask(http, url, chat(TOKENS)) for _ in range(STREAMS))
                streams = await asyncio.gather(*all_of_it)
                spent_s = cpu_s(pid) - before_s
                chunks.append(spent_s / sum(stream.num_chunks for stream in streams))
    return found


def overhead_main(program: str) -> Iterator[str]:
    for headway in (True, False):
        with stubs(1, headway=headway) as (urls, _), contextlib.ExitStack() as stack:
            kind = "Headway stub" if headway else "other stub"
            rows: list[Row] = [(f"nothing, {kind}", urls[0], None)]
            rows.append((f"a bare relay, {kind}", *stack.enter_context(relay(urls[0]))))
            url, pid = stack.enter_context(ours(urls))
            rows.append((f"headway gateway, {kind}", url + "/v1", pid))
            if program and not headway:
                url, pid = stack.enter_context(litellm(urls, program))
                rows.append((f"LiteLLM, {kind}", url + "/v1", pid))
            figures = asyncio.run(overhead(rows))
            for (name, _, _), (ttfts, chunks) in zip(rows, figures, strict=True):
                p99 = quantiles(ttfts, n=100)[98]
                cpu = " … ".join(f"{1e6 * f(chunks):.1f}" for f in (min, median, max) if chunks)
                yield line((name, f"{1e3 * median(ttfts):.2f}", f"{1e3 * p99:.2f}", cpu))


# ── faults ──────────────────────────────────────────────────────────────────────────────────


async def through_faults(url: str, pid: int, count: int) -> tuple[int, int, float]:
    """(complete, silent ends, seconds) of so many streams, 40 at once; one upstream dies."""
    gate, began_s = asyncio.Semaphore(40), time.perf_counter()
    text = "".join(f"t{i} " for i in range(8))
    async with session() as http:

        async def one(number: int) -> Stream:
            async with gate:
                if number == 3 * count // 8:
                    os.kill(pid, signal.SIGUSR1)
                elif number == 5 * count // 8:
                    os.kill(pid, signal.SIGUSR2)
                return await ask(http, url, chat(8))

        found = await asyncio.gather(*(one(number) for number in range(count)))
    complete = sum(stream.is_complete(text) for stream in found)
    told = sum(stream.ends_with_error for stream in found if not stream.is_complete(text))
    return complete, count - complete - told, time.perf_counter() - began_s


def faults_main(program: str, count: int) -> Iterator[str]:
    kinds = [("headway gateway", True, ours), ("headway gateway", False, ours)]
    if program:
        kinds.append(("LiteLLM", False, lambda urls: litellm(urls, program)))
    for name, headway, begun in kinds:
        with stubs(4, headway=headway, faulty=True) as (urls, process):
            route = {"policy": "round_robin", "first_token": "5s"} if begun is ours else {}
            with begun(urls, **route) as (url, _):
                result = through_faults(url + "/v1", process.pid, count)
                complete, silent, seconds = asyncio.run(result)
            process.terminate()
            attempts = int(process.stdout.readline()) / count
            process.wait()
        kind = "Headway stubs" if headway else "other stubs"
        share = f"{complete} of {count}"
        yield line((name, kind, share, silent, f"{attempts:.3f}", f"{seconds:.1f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "faults", "stubs"))
    parser.add_argument("--given", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--litellm", default="", help="LiteLLM's program, to be measured beside")
    parser.add_argument("--requests", type=int, default=800)
    asked = parser.parse_args()
    if asked.what == "stubs":
        stubs_main(**json.loads(asked.given))
        return
    os.environ["HEADWAY_LOG_LEVEL"] = "error"
    print(heading(COLUMNS[asked.what]), flush=True)
    rows = {
        "overhead": lambda: overhead_main(asked.litellm),
        "faults": lambda: faults_main(asked.litellm, asked.requests),
    }
    for row in rows[asked.what]():
        print(row, flush=True)


if __name__ == "__main__":
    main()
