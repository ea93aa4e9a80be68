"""Replicas that die under load: who is complete, whose tokens differ, how long the longest gap is.

    python benchmarks/replicas.py [FOLDER] [--replicas 4] [--streams 200] [--minutes 0]

Many streams at once (greedy, seeded, with a schema, with tools) run undisturbed once; that is what
they have to give. Then again, while an engine is killed, stopped (silent from then on), hung (the
thread that computes is held, its heartbeat goes on) or asked to end; with `--minutes`, each engine
in turn for so long, beside a load that never ends.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp

from common import children, get_json, markdown, serving, write_json
from headway.admit.route import Candidate, choose_engine
from headway.core.request import Request
from headway.frontend.replicas import Replicas

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked to end": signal.SIGTERM}
WAYS = ("killed", "stopped", "hung", "asked to end")
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_ALL = 0x4206, 0x4207, 0x40000000
WORDS = "river stone light garden winter letter morning engine table forest silver music".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "parameters": SCHEMA}}
KINDS = ("greedy", "seeded", "schema", "tools")
EVERY_S = 5.0
"""How long after one engine is whole again the next one is ended."""


@dataclass(slots=True)
class Told:
    """What one stream gave: its text, when its chunks came, and how it ended."""

    kind: str
    parts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    failure: str = ""
    reason: str = ""

    @property
    def given(self) -> tuple[str, str]:
        return "".join(self.parts), self.reason

    @property
    def gap_s(self) -> float:
        """The longest time between two chunks."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:])), default=0.0)


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """Request `number`, the same in each run."""
    source, kind = random.Random(number), KINDS[number % len(KINDS)]
    words = " ".join(source.choices(WORDS, k=source.randint(5, 60)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Write about: {words}."}],
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
    }
    if kind == "greedy":
        return body | {"ignore_eos": True}
    body |= {"temperature": 0.9, "seed": number}
    if kind == "seeded":
        return body | {"ignore_eos": True}
    if kind == "schema":
        shape = {"name": "person", "schema": SCHEMA, "strict": True}
        return body | {"response_format": {"type": "json_schema", "json_schema": shape}}
    return body | {"tools": [TOOL], "tool_choice": "required"}


async def ask(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> Told:
    """Stream the answer of one request; a failure is told, not raised."""
    told = Told(KINDS[number % len(KINDS)])
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body_of(number, tokens)) as got:
            if got.status != 200:
                told.failure = f"{got.status} {(await got.text())[:120]}"
                return told
            async for event in events(got):
                told.times_s.append(time.monotonic())
                if "error" in event:
                    told.failure = str(event["error"])[:120]
                    return told
                for choice in event["choices"]:
                    delta = choice["delta"]
                    told.parts.append(delta.get("content") or "")
                    for call in delta.get("tool_calls") or []:
                        told.parts.append(call["function"].get("arguments") or "")
                    told.reason = choice["finish_reason"] or told.reason
    except (aiohttp.ClientError, OSError) as error:
        told.failure = repr(error)[:120]
    if not told.reason and not told.failure:
        told.failure = "no end"
    return told


async def events(got: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for raw in got.content:
        if raw.startswith(b"data: {"):
            yield json.loads(raw[6:])


def engines(pid: int) -> list[int]:
    """The processes of the server's engines."""
    return [
        p for p in children(pid) if b"headway.assemble" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]


def end(pid: int, way: str) -> None:
    """End an engine in one of the `WAYS`."""
    if way in SIGNALS:
        os.kill(pid, SIGNALS[way])
    else:
        threading.Thread(target=hold, args=(busiest(pid),), daemon=True).start()


def busiest(pid: int) -> int:
    """The thread of a process that has computed most."""

    def ticks(thread: int) -> int:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    return max((int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()), key=ticks)


def hold(thread: int) -> None:
    """Keep a thread of another process where it is until somebody kills that."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(ctypes.c_long(request), thread, None, None):
            why = os.strerror(ctypes.get_errno())
            print(f"thread {thread} is not held: ptrace says {why}", file=sys.stderr)
            return
    while os.WIFSTOPPED(os.waitpid(thread, WAIT_ALL)[1]):
        pass


async def burst(url: str, args: argparse.Namespace, way: str = "", pid: int = 0) -> list[Told]:
    """All streams at once; an engine is ended that way once every stream has begun or waits."""
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=limit, timeout=aiohttp.ClientTimeout(600)
    ) as session:
        tasks = [
            asyncio.create_task(ask(session, url, n, args.tokens)) for n in range(args.streams)
        ]
        if way:
            await asyncio.sleep(args.after)
            end(random.Random(way).choice(engines(pid)), way)
        return await asyncio.gather(*tasks)


def judge(found: list[Told], expected: list[Told]) -> list[object]:
    """Complete, tokens equal, longest gap, failures."""
    whole = sum(not told.failure for told in found)
    equal = sum(a.given == b.given and not a.failure for a, b in zip(found, expected, strict=True))
    gap_s = max(told.gap_s for told in found)
    failures = dict(Counter(told.failure for told in found if told.failure))
    return [f"{whole} of {len(found)}", equal, f"{gap_s:.2f} s", failures or ""]


async def whole_again(url: str, count: int) -> float:
    """Seconds until every engine is ready."""
    began_s = time.monotonic()
    while (
        sum(e["ready"] for e in (await asyncio.to_thread(get_json, f"{url}/stats"))["engines"])
        < count
    ):
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


async def in_turn(
    url: str, pid: int, args: argparse.Namespace, expected: list[Told]
) -> list[object]:
    """Each engine in turn is ended in one of the ways, beside a load that goes on."""
    found: list[tuple[int, Told]] = []
    until_s, numbers, ended = time.monotonic() + 60 * args.minutes, iter(range(10**9)), 0

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until_s:
            number = next(numbers) % args.streams
            found.append((number, await ask(session, url, number, args.tokens)))

    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=limit, timeout=aiohttp.ClientTimeout(600)
    ) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(args.clients)]
        while time.monotonic() < until_s - 2 * EVERY_S:
            await asyncio.sleep(EVERY_S)
            alive = engines(pid)
            end(alive[ended % len(alive)], args.ways[ended % len(args.ways)])
            ended += 1
            await asyncio.sleep(EVERY_S)
            await whole_again(url, args.replicas)
        await asyncio.gather(*clients)
    figures = judge([told for _, told in found], [expected[number] for number, _ in found])
    return [f"{ended} ended in turn, {args.clients} at once", *figures, ""]


def memory_of(pids: list[int]) -> str:
    """What the engines hold: PSS counts a page once, however many have it mapped."""
    held: Counter[str] = Counter()
    for pid in pids:
        for text in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, size = text.partition(":")
            held[name] += int(size.split()[0])
    mib = {name: f"{kib / 1024:.0f} MiB" for name, kib in held.items()}
    return (
        f"{len(pids)} engines hold {mib['Rss']} (RSS), a page that several have counted once "
        f"{mib['Pss']} (PSS): {mib['Pss_File']} of files, {mib['Pss_Anon']} of their own"
    )


class AlwaysReady:
    """An engine's client that takes everything, to time those who choose it."""

    ready = takes = True
    trying = False
    num_requests = 0

    def submit(self, *given: object) -> None:
        self.num_requests += 1


def choice_us(count: int, rounds: int = 4000) -> float:
    """Microseconds of `Replicas.submit` beyond those of the engine's client, and of the choice
    among `count` engines by wait and requests; the least of some."""
    clients: Any = [AlwaysReady() for _ in range(count)]
    replicas, request = Replicas(clients), cast(Request, None)
    candidates = [Candidate(0.01 * n, n) for n in range(count)]
    found = []
    for _ in range(9):
        began_s = time.perf_counter()
        for _ in range(rounds):
            clients[0].submit(request, None, None, ())
        client_s = time.perf_counter() - began_s
        for _ in range(rounds):
            replicas.submit(request, engine=choose_engine(candidates))
        found.append(time.perf_counter() - began_s - 2 * client_s)
    return 1e6 * min(found) / rounds


async def measure(url: str, pid: int, args: argparse.Namespace) -> list[list[object]]:
    """A row for each way, against an undisturbed run."""
    await whole_again(url, args.replicas)
    expected = await burst(url, args)
    rows: list[list[object]] = [["undisturbed", *judge(expected, expected), ""]]
    for way in args.ways:
        found = await burst(url, args, way, pid)
        rows.append([f"one {way}", *judge(found, expected)])
        rows[-1].append(f"{await whole_again(url, args.replicas):.1f} s")
    if args.minutes:
        rows.append(await in_turn(url, pid, args, expected))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer")
    parser.add_argument(
        "--after", type=float, default=2.0, help="seconds until the engine is ended"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--minutes", type=float, default=0, help="of engines ended in turn")
    parser.add_argument(
        "--step-timeout", type=float, default=2.0, help="a step that hangs, seconds"
    )
    parser.add_argument("--clients", type=int, default=16, help="at once beside those")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = (f"--replicas={args.replicas}", f"--step-timeout={args.step_timeout:g}")
    print(f"choosing among {args.replicas}: {choice_us(args.replicas):.1f} us a request")
    with serving(args.folder, *flags, "--max-queue=100000", "--max-queue-wait=600") as (url, pid):
        rows = asyncio.run(measure(url, pid, args))
        print(memory_of(engines(pid)) + "\n")
    print(
        markdown(["", "complete", "tokens equal", "longest gap", "failures", "whole again"], rows)
    )
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
