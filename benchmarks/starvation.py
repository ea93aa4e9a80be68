"""Whether one user starves another: `python benchmarks/starvation.py [FOLDER]`.

User A takes all there is, in one of three ways; user B asks 100 times for two tokens, with the
class `interactive`, while A's answers last. What is asked: B's first token within its objective in
95 of 100 tries, and that all of A's answers come, with the tokens that they have alone.

    long    64 streams of 1,900 tokens, each begun anew when it ends
    slow    the same, read at 2 KB/s each until B has asked
    wide    one request of 256 prompts with n = 16: 4,096 sequences

    python benchmarks/starvation.py --json starvation.json

The default is the embedded model.
"""

import argparse
import asyncio
import json
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import heading, write_json
from headway.spec.embedded import EMBEDDED
from judged import wilson
from served import headway

CASES = ("long", "slow", "wide")
KEYS = {"A": "hw-the-key-of-user-A", "B": "hw-the-key-of-user-B"}
OBJECTIVE_S, ASKED = 1.5, 0.95
PATIENCE_S, PAUSE_S = 100.0, 0.1
SLOW_BYTES, SLOW_S = 1024, 0.5
PROMPTS = 8
"""Different prompts of A's streams; each is also asked alone."""


class Run:
    """One server, A's answers by prompt as (ids by choice), and B's waits."""

    def __init__(self, url: str, given: argparse.Namespace) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.given = given
        self.is_slow = False
        self.ends = False
        self.answers: list[tuple[int, dict[int, list[int]]]] = []
        self.waits: list[tuple[int, float]] = []

    async def post(
        self, user: str, body: dict[str, Any], *, buffer: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Reader and writer of the answer, and its status."""
        sock = socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=buffer or 2**20)
        data = json.dumps({"stream": True, "ignore_eos": True, **body}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: headway\r\nconnection: close\r\n"
            f"authorization: Bearer {KEYS[user]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        return reader, writer, int(answer.split()[1])

    async def answer(self, body: dict[str, Any]) -> dict[int, list[int]]:
        """Read one of A's answers, slowly while that is asked; ids by choice."""
        body = {**body, "return_token_ids": True}
        reader, writer, status = await self.post("A", body, buffer=4096 if self.is_slow else 0)
        pieces = []
        while True:
            piece = await reader.read(SLOW_BYTES if self.is_slow else 2**20)
            if not piece:
                break
            pieces.append(piece)
            if self.is_slow:
                await asyncio.sleep(SLOW_S)
        writer.close()
        return ids_of(b"".join(pieces)) if status == 200 else {}

    async def stream(self, number: int) -> None:
        """A's streams, one after the other."""
        while not self.ends:
            self.answers.append((number, await self.answer(self.body(number))))

    def body(self, number: int) -> dict[str, Any]:
        prompt = [5 + number, 7, 9, 11]
        return {"prompt": prompt, "max_tokens": self.given.tokens, "temperature": 0}

    async def wide(self) -> None:
        """One request with all slots and more."""
        found = await self.answer(self.wide_body(range(256)))
        for number in range(256):
            self.answers.append((number, {i: found.get(16 * number + i, []) for i in range(16)}))

    def wide_body(self, numbers: "range") -> dict[str, Any]:
        prompts = [[5 + n % 100, 7 + n // 100, 9] for n in numbers]
        tokens = self.given.wide_tokens
        return {"prompt": prompts, "n": 16, "max_tokens": tokens, "temperature": 1, "seed": 3}

    async def ask(self) -> None:
        """B's tries: (status, seconds to the first token)."""
        body = {"prompt": [3, 4, 5], "max_tokens": 2, "service_class": "interactive"}
        for _ in range(self.given.tries):
            began_s, status = time.perf_counter(), 0
            try:
                async with asyncio.timeout(PATIENCE_S):
                    reader, writer, status = await self.post("B", body)
                    await reader.readuntil(b"data: {")
                    writer.close()
            except (TimeoutError, asyncio.IncompleteReadError):
                status = status if status != 200 else 0
            self.waits.append((status, time.perf_counter() - began_s))
            await asyncio.sleep(PAUSE_S)

    async def case(self, name: str) -> None:
        """A begins, B asks, A's answers are awaited."""
        self.is_slow = name == "slow"
        if name == "wide":
            taken = [asyncio.create_task(self.wide())]
        else:
            taken = [asyncio.create_task(self.stream(n % PROMPTS)) for n in range(64)]
        await asyncio.sleep(2.0)
        await self.ask()
        self.is_slow, self.ends = False, True
        await asyncio.gather(*taken)

    async def alone(self, name: str) -> dict[int, dict[int, list[int]]]:
        """By prompt the answers with nobody beside."""
        if name == "wide":
            return {n: await self.answer(self.wide_body(range(n, n + 1))) for n in (0, 100, 255)}
        return {n: await self.answer(self.body(n)) for n in range(PROMPTS)}


def ids_of(stream: bytes) -> dict[int, list[int]]:
    """Choice → token ids, from the events of a stream."""
    found: dict[int, list[int]] = {}
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return found


@contextmanager
def running(given: argparse.Namespace) -> Iterator[str]:
    """The URL of a server with two keys."""
    keys = " ".join(f"--api-key {shlex.quote(key)}" for key in KEYS.values())
    with headway("ours", given.folder, f"{keys} {given.flags}").running() as url:
        yield url


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case on a server of its own."""
    with running(given) as url:
        run = Run(url, given)
        asyncio.run(run.case(name))
        alone = asyncio.run(run.alone(name))
    whole = given.wide_tokens if name == "wide" else given.tokens
    same = [found == alone[n] for n, found in run.answers if n in alone]
    finished = [
        bool(found) and all(len(ids) == whole for ids in found.values()) for _, found in run.answers
    ]
    waits = [seconds for status, seconds in run.waits if status == 200]
    return {
        "case": name,
        "tries": len(run.waits),
        "met": sum(seconds <= OBJECTIVE_S for seconds in waits),
        "refused": sum(status in (429, 503) for status, _ in run.waits),
        "unserved": sum(status == 0 for status, _ in run.waits),
        "ttft_s": np.percentile(waits, (50, 95, 100)).round(4).tolist() if waits else [],
        "answers": len(run.answers),
        "finished": sum(finished),
        "compared": len(same),
        "same": sum(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=str(EMBEDDED))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1900, help="of each of A's streams")
    parser.add_argument("--wide-tokens", type=int, default=150)
    parser.add_argument("--flags", default="", help="of the server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    told = "TTFT p50 / p95 / max, s"
    print(heading(["case", "within 1.5 s", "refused", told, "A's answers", "same tokens"]))
    for name in given.cases.split(","):
        row = measure(name, given)
        rows.append(row)
        low, high = wilson(row["met"], row["tries"])
        times = " / ".join(f"{seconds:.2f}" for seconds in row["ttft_s"])
        print(
            f"| {name} | {row['met']} of {row['tries']} ({low:.0%} to {high:.0%}) "
            f"| {row['refused']} | {times} | {row['finished']} of {row['answers']} "
            f"| {row['same']} of {row['compared']} |",
            flush=True,
        )
    write_json(given.json, rows, indent=1)


if __name__ == "__main__":
    main()
