"""Whether the ledger equals what was relayed, and what an outage of all upstreams costs.

    python benchmarks/gateway_books.py ledger [--requests 10000]    5% cut, the gateway killed twice
    python benchmarks/gateway_books.py outage [--seconds 60]        all down, then back

Upstreams are stubs in a process of their own (`tests/gateway_world.py`). In `ledger` one request in
twenty is cut by its client after some tokens, who then reads what was on its way; one in twenty
breaks at its upstream; and the gateway gets SIGKILL at a third and at two thirds. What clients have
read is compared with what is on disk.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from common import free_port, heading, line, stop, wait_until_ready
from gateway import KEY, attempts_of, chat, session, stubs

AT_ONCE, TOKENS, CUT = 40, 12, 0.05
RATE = 20.0


class Gateway:
    """`headway gateway` on one folder and port, which may be killed and started again."""

    def __init__(self, folder: Path, urls: list[str]) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        rows = [{"name": f"u{i}", "url": url} for i, url in enumerate(urls)]
        models = [{"name": "tiny", "policy": "round_robin"}]
        (folder / "gateway.yaml").write_text(json.dumps({"upstreams": rows, "models": models}))
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        flags = [f"--port={self.port}", f"--data-dir={self.folder}", "--log-level=error"]
        file = str(self.folder / "gateway.yaml")
        command = [sys.executable, "-m", "headway.cli.main", "gateway", file, *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until_ready(self.url, process)
        return process

    def kill(self) -> None:
        """SIGKILL, and again from what is on disk."""
        self.process.kill()
        self.process.wait()
        self.process = self._started()

    def rows(self) -> list[tuple[int, str, int, int]]:
        """(number of the request, status, answer tokens, estimated) of each in the ledger."""
        query = "SELECT CAST(task AS INTEGER), status, output_tokens, estimated FROM requests"
        ledger = sqlite3.connect(self.folder / "gateway" / "ledger.db")
        with contextlib.closing(ledger) as opened:
            return opened.execute(query).fetchall()


@contextlib.contextmanager
def gateway(urls: list[str]) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory() as folder:
        started = Gateway(Path(folder), urls)
        try:
            yield started
        finally:
            stop(started.process)


# ── the ledger ──────────────────────────────────────────────────────────────────────────────


class Client:
    """One request over a socket of its own; `cut` closes its half after some tokens."""

    def __init__(self, port: int, number: int, cut: int) -> None:
        self._port = port
        self._number = number
        self._cut = cut
        self.num_tokens = 0
        """Tokens that it has read."""
        self.complete = False

    async def run(self) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            body = json.dumps(chat(TOKENS)).encode()
            lines = [
                "POST /v1/chat/completions HTTP/1.1",
                f"host: localhost\r\nauthorization: Bearer {KEY}\r\nconnection: close",
                f"content-type: application/json\r\ncontent-length: {len(body)}",
                f"x-headway-task-id: {self._number}\r\n\r\n",
            ]
            writer.write("\r\n".join(lines).encode() + body)
            await self._read(reader, writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while more := await reader.read(65536):
            data += more
            self.num_tokens = data.count(b'"content":"t')
            self.complete = b"[DONE]" in data
            if self.complete:
                return
            if self._cut and self.num_tokens >= self._cut:
                writer.write_eof()


async def through_kills(ours: Gateway, count: int) -> list[Client]:
    """All clients, some at once; nobody comes while the gateway starts again."""
    dice, gate, up = random.Random(2), asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    async def one(number: int, client: Client) -> None:
        async with gate:
            async with up:
                if number in (count // 3, 2 * count // 3):
                    await asyncio.to_thread(ours.kill)
            await client.run()

    cuts = [dice.randint(1, 6) if dice.random() < CUT else 0 for _ in range(count)]
    clients = [Client(ours.port, number, cut) for number, cut in enumerate(cuts)]
    await asyncio.gather(*(one(number, each) for number, each in enumerate(clients)))
    await asyncio.sleep(2.0)
    return clients


STATES = {"ok": "complete", "left": "left by their clients", "interrupted": "cut by a kill"}
ON_ITS_WAY = "complete, the last bytes cut by a kill"


def ledger_main(count: int) -> Iterator[str]:
    with stubs(3, headway=True, broken=CUT) as (urls, _), gateway(urls) as ours:
        clients = asyncio.run(through_kills(ours, count))
        rows = ours.rows()
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in STATES.values()}
    for number, state, tokens, estimated in rows:
        client, name = clients[number], STATES.get(state, state)
        if state == "ok" and not client.complete:
            name = ON_ITS_WAY
        found.setdefault(name, []).append((client.num_tokens, tokens, estimated))
    for name, kept in found.items():
        read, there, estimates = (sum(row[i] for row in kept) for i in range(3))
        yield line((name, len(kept), read, there, sum(a != b for a, b, _ in kept), estimates))
    known = {number for number, *_ in rows}
    lost = [client for number, client in enumerate(clients) if number not in known]
    yield line(("without a row", len(lost), sum(client.num_tokens for client in lost), "", "", ""))


# ── an outage ───────────────────────────────────────────────────────────────────────────────


async def asked(http: aiohttp.ClientSession, url: str) -> tuple[float, float, bool]:
    """(when it was asked, seconds it took, whether it was answered in full)."""
    began_s = time.monotonic()
    try:
        async with http.post(url + "/v1/chat/completions", json=chat(4)) as answer:
            data: Any = await answer.read()
            good = answer.status == 200 and b"[DONE]" in data
    except aiohttp.ClientError:
        good = False
    return began_s, time.monotonic() - began_s, good


async def through_outage(url: str, pid: int, seconds: float) -> dict[str, Any]:
    """What clients see before, while and after all upstreams are down."""
    tasks: list[asyncio.Task[tuple[float, float, bool]]] = []
    attempts: dict[str, float] = {}

    async def load(http: aiohttp.ClientSession, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            tasks.append(asyncio.create_task(asked(http, url)))
            await asyncio.sleep(1 / RATE)

    async with session() as http:
        await load(http, 3.0)
        attempts["before"] = sum(await attempts_of(url))
        os.kill(pid, signal.SIGUSR1)
        down_s = time.monotonic()
        await load(http, seconds)
        attempts["down"] = sum(await attempts_of(url)) - attempts["before"]
        os.kill(pid, signal.SIGUSR2)
        up_s = time.monotonic()
        await load(http, 10.0)
        found = await asyncio.gather(*tasks)
    refused = [took for at, took, good in found if down_s + 0.1 < at < up_s and not good]
    bad = [at for at, _, good in found if at > up_s and not good]
    return {
        "refused": f"{len(refused)} of {round(seconds * RATE)}",
        "p50": f"{1e3 * median(refused):.1f}",
        "p99": f"{1e3 * quantiles(refused, n=100)[98]:.1f}",
        "most": f"{1e3 * max(refused):.0f}",
        "attempts": f"{attempts['down'] / (seconds * RATE):.3f}",
        "normal": f"{max(bad) - up_s if bad else 0.0:.1f}",
    }


def outage_main(seconds: float) -> Iterator[str]:
    with stubs(3, headway=True, together=True) as (urls, process), gateway(urls) as ours:
        found = asyncio.run(through_outage(ours.url, process.pid, seconds))
    yield line(tuple(found.values()))


COLUMNS = {
    "ledger": ("requests", "so many", "tokens read", "in the ledger", "that differ", "estimates"),
    "outage": (
        *("refused", "refused in p50 (ms)", "p99 (ms)", "at most (ms)"),
        *("attempts a request, down", "normal after (s)"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=tuple(COLUMNS))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    print(heading(COLUMNS[given.what]), flush=True)
    rows = ledger_main(given.requests) if given.what == "ledger" else outage_main(given.seconds)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
