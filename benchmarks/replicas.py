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
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from common import children, get_json, markdown, serving, write_json

WORDS = "river stone light garden winter letter morning engine table forest silver music".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "parameters": SCHEMA}}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked to end": signal.SIGTERM}
WAYS = ("killed", "stopped", "hung", "asked to end")
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_ALL = 0x4206, 0x4207, 0x40000000
LOOK_S = 0.05
KINDS = ("greedy", "seeded", "schema", "tools")
ENDED = ("", "ends", "until the next one answers", "its load", "without", "until it begins")
"""Of each way the end with the longest time from the signal until a new engine had answered, beside
what that took to load."""
EVERY_S = 5.0
"""How long after one engine is whole again the next one is ended."""


# ── engines that end ────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Ended:
    """An engine that was ended, and the one in its place; times of the monotonic clock, seconds.

    `again_s` is when the new engine's process began, `ready_s` when it took requests, `answered_s`
    when it had made a step with one: each seen a look late at the most, but for `again_s`.
    """

    way: str
    number: int
    at_s: float
    again_s: float = 0.0
    ready_s: float = 0.0
    answered_s: float = 0.0

    @property
    def load_s(self) -> float:
        """What the new engine took from its process's start until it was ready."""
        return self.ready_s - self.again_s

    @property
    def away_s(self) -> float:
        """From the signal to the first step with a request in the new engine."""
        return self.answered_s - self.at_s


class Fleet:
    """The engines of the server `pid` at `url`, by number."""

    def __init__(self, url: str, pid: int) -> None:
        """The order of the processes is not that of the server's own numbers."""
        self.url, self._pid = url, pid
        self.pids = engines(pid)
        self._away = set[int]()
        """Those that are followed, by the server's numbers."""

    def end(self, number: int, way: str) -> Ended:
        """End an engine in one of the `WAYS`."""
        pid, at_s = self.pids[number], time.monotonic()
        if way in SIGNALS:
            os.kill(pid, SIGNALS[way])
        else:
            threading.Thread(target=hold, args=(busiest(pid),), daemon=True).start()
        return Ended(way, number, at_s)

    async def follow(self, ended: Ended) -> None:
        """Wait until another engine answers in its place; somebody has to go on asking.

        Which number it has is seen where the server says that it is not ready.
        """
        known, number = set(self.pids), -1
        while not ended.answered_s:
            await asyncio.sleep(LOOK_S)
            if not ended.again_s:
                for pid in set(engines(self._pid)) - known:
                    self.pids[ended.number], ended.again_s = pid, began_s(pid)
            told = (await asyncio.to_thread(get_json, f"{self.url}/stats"))["engines"]
            if number < 0:
                away = {at for at, engine in enumerate(told) if not engine["ready"]} - self._away
                number = min(away, default=-1)
                self._away |= {number}
            elif ended.again_s and told[number]["ready"]:
                ended.ready_s = ended.ready_s or time.monotonic()
                if told[number]["num_running"]:
                    ended.answered_s = time.monotonic()
        self._away.discard(number)


def engines(pid: int) -> list[int]:
    """The processes of the server's engines."""
    found = []
    for child in children(pid):
        try:
            if b"headway.assemble" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:  # it has just ended
            continue
    return found


def began_s(pid: int) -> float:
    """When a process began, by the monotonic clock: in the system's ticks of 10 ms."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep_s


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


def rows_by_way(ends: Sequence[Ended]) -> list[list[object]]:
    """A row for each way: of its ends the longest time away, beside the load in it."""
    rows: list[list[object]] = []
    for way in dict.fromkeys(ended.way for ended in ends):
        of_way = [ended for ended in ends if ended.way == way]
        worst = max(of_way, key=lambda ended: ended.away_s - ended.load_s)
        rows.append(
            [
                *(way, len(of_way), f"{worst.away_s:.1f} s", f"{worst.load_s:.1f} s"),
                *(f"{worst.away_s - worst.load_s:.1f} s", f"{worst.again_s - worst.at_s:.1f} s"),
            ]
        )
    return rows


# ── the load ────────────────────────────────────────────────────────────────────────────────


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
    def longest(self) -> tuple[float, float]:
        """When the longest time between two chunks began and ended."""
        gaps = zip(self.times_s, self.times_s[1:])
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))

    @property
    def gap_s(self) -> float:
        begin_s, end_s = self.longest
        return end_s - begin_s


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


@asynccontextmanager
async def session_of() -> AsyncIterator[aiohttp.ClientSession]:
    """Of as many connections as there are streams."""
    limit, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=limit, timeout=patience) as session:
        yield session


async def burst(
    fleet: Fleet, args: argparse.Namespace, count: int, way: str = ""
) -> tuple[list[Told], list[Ended]]:
    """So many streams at once; an engine is ended that way once every stream has begun or waits.

    `--clients` others go on until the next one has answered in its place.
    """
    ends: list[Ended] = []
    others = itertools.count(10**6)
    async with session_of() as session:

        async def until_answered() -> None:
            while not ends[0].answered_s:
                await ask(session, fleet.url, next(others), args.tokens)

        tasks = [asyncio.create_task(ask(session, fleet.url, n, args.tokens)) for n in range(count)]
        if way:
            await asyncio.sleep(args.after)
            number = random.Random(way).randrange(args.replicas)
            ends.append(fleet.end(number, way))
            asking = [until_answered() for _ in range(args.clients)]
            await asyncio.gather(fleet.follow(ends[0]), *asking)
        return await asyncio.gather(*tasks), ends


def judge(found: list[Told], expected: list[Told]) -> list[object]:
    """Complete, tokens equal, longest gap, failures."""
    whole = sum(not told.failure for told in found)
    equal = sum(a.given == b.given and not a.failure for a, b in zip(found, expected, strict=True))
    gap_s = max(told.gap_s for told in found)
    failures = dict(Counter(told.failure for told in found if told.failure))
    return [f"{whole} of {len(found)}", equal, f"{gap_s:.2f} s", failures or ""]


async def whole(url: str, count: int) -> None:
    """Wait until every engine is ready."""
    while True:
        stats = await asyncio.to_thread(get_json, f"{url}/stats")
        if sum(engine["ready"] for engine in stats["engines"]) == count:
            return
        await asyncio.sleep(0.1)


async def in_turn(
    fleet: Fleet, args: argparse.Namespace, expected: list[Told]
) -> tuple[list[tuple[int, Told]], list[Ended]]:
    """Each engine in turn is ended in one of the ways, beside a load that goes on."""
    found: list[tuple[int, Told]] = []
    ends: list[Ended] = []
    until_s, numbers = time.monotonic() + 60 * args.minutes, iter(range(10**9))
    async with session_of() as session:

        async def client() -> None:
            while time.monotonic() < until_s or not all(one.answered_s for one in ends):
                number = next(numbers) % args.streams
                found.append((number, await ask(session, fleet.url, number, args.tokens)))

        clients = [asyncio.create_task(client()) for _ in range(args.clients)]
        while time.monotonic() < until_s - 2 * EVERY_S:
            await asyncio.sleep(EVERY_S)
            way = args.ways[len(ends) % len(args.ways)]
            ends.append(fleet.end(len(ends) % args.replicas, way))
            await fleet.follow(ends[-1])
        await asyncio.gather(*clients)
    return found, ends


async def measure(url: str, pid: int, args: argparse.Namespace) -> list[list[list[object]]]:
    """(a row for each way, against an undisturbed run; a row for each way, of the ends)."""
    await whole(url, args.replicas)
    fleet = Fleet(url, pid)
    expected, _ = await burst(fleet, args, args.streams)
    rows: list[list[object]] = [["undisturbed", *judge(expected, expected)]]
    _, alone = await burst(fleet, args, 0, "killed")
    ended = [[f"beside {args.clients} streams: killed", *row[1:]] for row in rows_by_way(alone)]
    for way in args.ways:
        found, ends = await burst(fleet, args, args.streams, way)
        rows.append([f"one {way}", *judge(found, expected)])
        ended += [[f"… and {args.streams} at once: {way}", *row[1:]] for row in rows_by_way(ends)]
    if args.minutes:
        each, ends = await in_turn(fleet, args, expected)
        found = [told for _, told in each]
        rows.append([f"{len(ends)} ended in turn, {args.clients} at once"])
        rows[-1] += judge(found, [expected[number] for number, _ in each])
        ended += [[f"in turn: {row[0]}", *row[1:]] for row in rows_by_way(ends)]
    return [rows, ended]


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
    with serving(args.folder, *flags, "--max-queue=100000", "--max-queue-wait=600") as (url, pid):
        rows, ended = asyncio.run(measure(url, pid, args))
    print(markdown(["", "complete", "tokens equal", "longest gap", "failures"], rows) + "\n")
    print(markdown(list(ENDED), ended))
    write_json(args.json, [rows, ended])


if __name__ == "__main__":
    main()
