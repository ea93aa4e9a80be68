"""What an attack costs everybody else: `python benchmarks/attacks.py upstream|fallback|storm|slow`.

    upstream    an upstream of the gateway sends endlessly; /health and requests to a second one
    fallback    the same from a --fallback-model of the server
    storm       one key opens thousands of connections and resets half; another key's requests
    slow        one key opens hundreds of streams at once; /health and another key's requests

Attackers and probes are processes of their own. Told are percentiles in milliseconds of what the
probes saw before the attack and during it. `--gateway` puts a gateway before the server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp

from common import free_port, heading, line, running, serve_command
from gateway import stubs

BAD, GOOD = "bad", "good"
"""Models and keys: of the attacker, of everybody else."""
PATIENCE_S = 10.0
"""What is unanswered so long after the last request counts as failed."""
KEYS = json.dumps(
    {"keys": [{"name": n, "sha256": sha256(f"sk-{n}".encode()).hexdigest()} for n in (BAD, GOOD)]}
)
PLAIN_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
FIRST = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE = PLAIN_SSE[:-2] + b"transfer-encoding: chunked\r\n\r\n" + chunk(FIRST)

ENDLESS = {
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 4000),
    "comments": (SSE, chunk(b":\n\n" * 20_000)),
    "bytes": (SSE, chunk(b":") * 10_000),
    "empty": (PLAIN_SSE, b"\n\n" * 40_000),
    "event": (PLAIN_SSE + b"data: ", b"a" * 60_000),
}
"""What an upstream begins with, and what it sends again and again."""


# ── the attackers ───────────────────────────────────────────────────────────────────────────


async def hostile_upstream(port: int, mode: str) -> None:
    """A server whose answers to POST never end."""
    models = b'{"data": [{"id": "bad", "owned_by": "x"}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    first, again = ENDLESS[mode]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(head % len(models) + models)
            writer.write(first)
            while True:
                writer.write(again)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()


async def ask_without_end(url: str, path: str, body: dict[str, Any], at_once: int) -> None:
    """So many clients that ask one request after the other."""
    headers = {"authorization": "Bearer sk-bad"}

    async def client(http: aiohttp.ClientSession) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.post(path, json=body, headers=headers) as answer:
                    await answer.read()
            await asyncio.sleep(0.01)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        await asyncio.gather(*(client(http) for _ in range(at_once)))


async def storm(port: int, rate: float, linger_s: float, data: bytes) -> None:
    """Connections at `rate`: whole requests reset after a while, and some that say nothing."""
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()

    def reset(one: socket.socket) -> None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()

    until_s, number = time.monotonic(), 0
    loop.add_signal_handler(
        signal.SIGTERM, lambda: (print(f"{number} connections", file=sys.stderr), os._exit(0))
    )
    while True:
        number, until_s = number + 1, until_s + 1 / rate
        one = socket.socket()
        one.setblocking(False)
        sockets.append(one)
        with contextlib.suppress(OSError):
            await loop.sock_connect(one, ("127.0.0.1", port))
            if number % 2:
                one.send(data)
                loop.call_later(linger_s, reset, one)
                sockets.pop()
        if len(sockets) > 1000:
            sockets.pop(0).close()
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))


async def slow_streams(port: int, count: int, data: bytes) -> None:
    """So many streams at once that nobody reads."""
    await asyncio.gather(*(open_stream(port, data) for _ in range(count)))
    await asyncio.sleep(600)


async def open_stream(port: int, data: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    writer.write(data)
    return writer


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-bad\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
    )


@contextlib.contextmanager
def aside(function: str, *given: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A function of this file in a process of its own."""
    process = subprocess.Popen([sys.executable, __file__, "aside", json.dumps([function, *given])])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


# ── the probes ──────────────────────────────────────────────────────────────────────────────


class Probe:
    """Seconds that requests took, each begun at its time, whatever the one before it did."""

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = {"health": [], "request": []}
        self.num_failed = 0

    async def run(self, url: str, seconds: float, body: dict[str, Any]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as http:
            began_s, tasks = time.monotonic(), []
            for number in range(int(seconds / 0.05)):
                await asyncio.sleep(max(0.0, began_s + number * 0.05 - time.monotonic()))
                tasks.append(asyncio.create_task(self._one(http, "health", None)))
                if number % 5 == 0:
                    tasks.append(asyncio.create_task(self._one(http, "request", body)))
            await asyncio.wait(tasks, timeout=PATIENCE_S)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _one(
        self, http: aiohttp.ClientSession, kind: str, body: dict[str, Any] | None
    ) -> None:
        began_s = time.monotonic()
        headers = {"authorization": "Bearer sk-good"}
        asked = (
            http.get("/health")
            if body is None
            else http.post("/v1/chat/completions", json=body, headers=headers)
        )
        try:
            async with asked as answer:
                await answer.read()
                self.num_failed += answer.status != 200
        except (aiohttp.ClientError, OSError, asyncio.CancelledError):
            self.num_failed += 1
        self.took_s[kind].append(time.monotonic() - began_s)

    def cells(self) -> list[str]:
        found = []
        for took_s in self.took_s.values():
            parts = quantiles(took_s, n=100)
            found += [f"{1000 * each:.0f}" for each in (parts[49], parts[98], max(took_s))]
        return [*found, str(self.num_failed)]


def measured(url: str, seconds: float, body: dict[str, Any]) -> list[str]:
    probe = Probe()
    asyncio.run(probe.run(url, seconds, body))
    return probe.cells()


# ── what is attacked ────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def gateway(rows: Sequence[dict[str, Any]], models: Sequence[dict[str, Any]]) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file, keys = Path(folder) / "gateway.yaml", Path(folder) / "keys.yaml"
        file.write_text(json.dumps({"upstreams": rows, "models": models}))
        keys.write_text(KEYS)
        keys.chmod(0o600)
        flags = [f"--port={port}", f"--data-dir={folder}", "--log-level=error"]
        command = [sys.executable, "-m", "headway.cli.main", "gateway", str(file), *flags]
        with running([*command, f"--key-file={keys}"], port) as (url, _):
            yield url


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        given = [f"--port={port}", f"--key-file={keys}", "--log-level=error", *flags]
        with running(serve_command("", *given), port) as (url, _):
            yield url


def chat(model: str, num_words: int = 0, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * num_words + "What is 2 + 3?"}]
    return {"model": model, "messages": messages, "max_tokens": 4, **fields}


def upstream(given: argparse.Namespace) -> Iterator[list[str]]:
    """Mode by mode, one attacker whose requests go to the hostile upstream."""
    for mode in given.modes or ENDLESS:
        port = free_port()
        with (
            stubs(1, headway=False) as (urls, _),
            aside("hostile_upstream", port, mode),
        ):
            rows = [
                {"name": GOOD, "url": urls[0], "model": "tiny"},
                {"name": BAD, "url": f"http://127.0.0.1:{port}/v1", "model": BAD},
            ]
            models = [{"name": name, "upstreams": [name]} for name in (GOOD, BAD)]
            with gateway(rows, models) as url:
                yield [mode, "before", *measured(url, given.seconds, chat(GOOD))]
                asked = chat(BAD, stream=True)
                with aside("ask_without_end", url, "/v1/chat/completions", asked, given.at_once):
                    time.sleep(0.5)
                    yield [mode, "attack", *measured(url, given.seconds, chat(GOOD))]


def fallback(given: argparse.Namespace) -> Iterator[list[str]]:
    """The same, where a server's fallback is hostile; only refused requests go there."""
    for mode in given.modes or ENDLESS:
        port = free_port()
        with aside("hostile_upstream", port, mode):
            place = f"--fallback-model=http://127.0.0.1:{port}/v1"
            with server(place, "--max-num-seqs=2", "--max-queue=1") as url:
                model = "headway-tiny"
                yield [mode, "before", *measured(url, given.seconds, chat(model))]
                asked = chat(model, stream=True, max_tokens=400)
                with aside("ask_without_end", url, "/v1/chat/completions", asked, given.at_once):
                    time.sleep(0.5)
                    yield [mode, "attack", *measured(url, given.seconds, chat(model))]


@contextlib.contextmanager
def served(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(URL, model) of the embedded model, behind a gateway where that is asked for."""
    if not given.gateway:
        with server("--max-connections=8192") as url:
            yield url, "headway-tiny"
        return
    with serving_alone() as url:
        rows = [{"name": GOOD, "url": f"{url}/v1", "model": "headway-tiny"}]
        with gateway(rows, [{"name": "headway-tiny", "upstreams": [GOOD]}]) as front:
            yield front, "headway-tiny"


@contextlib.contextmanager
def serving_alone() -> Iterator[str]:
    port = free_port()
    with running(serve_command("", f"--port={port}", "--log-level=error"), port) as (url, _):
        yield url


def attacked(given: argparse.Namespace, name: str, *attack: Any) -> Iterator[list[str]]:
    """The probes before an attack, and in it."""
    with served(given) as (url, model):
        body, port = chat(model), int(url.rpartition(":")[2])
        yield [name, "before", *measured(url, given.seconds, body)]
        with aside(attack[0], port, *attack[1:]):
            yield [name, "attack", *measured(url, given.seconds, body)]


def storms(given: argparse.Namespace) -> Iterator[list[str]]:
    data = raw_request(chat("headway-tiny", given.words, stream=True, max_tokens=200)).decode()
    yield from attacked(
        given, f"{given.rate:g} connections/s", "storm", given.rate, given.linger, data
    )


def slow(given: argparse.Namespace) -> Iterator[list[str]]:
    data = raw_request(chat("headway-tiny", given.words, stream=True, max_tokens=1000)).decode()
    yield from attacked(given, f"{given.streams} streams", "slow_streams", given.streams, data)


ATTACKS = {"upstream": upstream, "fallback": fallback, "storm": storms, "slow": slow}
ASIDE = {each.__name__: each for each in (hostile_upstream, ask_without_end, storm, slow_streams)}


def main() -> None:
    if sys.argv[1] == "aside":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        name, *given = json.loads(sys.argv[2])
        last = given[-1]
        given[-1] = last.encode() if name in ("storm", "slow_streams") else last
        asyncio.run(ASIDE[name](*given))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("modes", nargs="*")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rate", type=float, default=580.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--linger", type=float, default=0.0, help="seconds until a reset")
    parser.add_argument("--words", type=int, default=0, help="of the attacker's prompts")
    parser.add_argument("--gateway", action="store_true")
    given = parser.parse_args()
    columns = ["health p50", "p99", "worst", "request p50", "p99", "worst (ms)", "failed"]
    print(heading(["attack", "when", *columns]), flush=True)
    for cells in ATTACKS[given.attack](given):
        print(line(cells), flush=True)


if __name__ == "__main__":
    main()
