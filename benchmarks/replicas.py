"""Replicas that die under load: who is complete, whose tokens differ, how long the longest gap is.

    python benchmarks/replicas.py [FOLDER] [--replicas 4] [--streams 200] [--minutes 0]

Many streams at once (greedy, seeded, with a schema, with tools) run undisturbed once; that is what
they have to give. Then again, while an engine is killed, stopped (silent from then on), hung (the
thread that computes is held, its heartbeat goes on) or asked to end; with `--minutes`, each engine
in turn for so long, beside a load that never ends.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp

from common import get_json, markdown, serving, write_json
from ended import WAYS, Ended, Fleet, engines, told_by_way
from headway.admit.route import Candidate, choose_engine
from headway.core.request import Request
from headway.frontend.replicas import Replicas

WORDS = "river stone light garden winter letter morning engine table forest silver music".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "parameters": SCHEMA}}
KINDS = ("greedy", "seeded", "schema", "tools")
ENDED = ("", "ends", "until the next one answers", "its load", "without", "until it begins")
"""Of each way the end with the longest time from the signal until a new engine had answered, beside
what that took to load."""
ON_THE_WAY_S = 0.25
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
    def longest(self) -> tuple[float, float]:
        """When the longest time between two chunks began and ended."""
        gaps = zip(self.times_s, self.times_s[1:])
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))

    @property
    def gap_s(self) -> float:
        begin_s, end_s = self.longest
        return end_s - begin_s

    def met(self, ends: Sequence[Ended]) -> list[Ended]:
        """The ends that fall into its longest gap, or just before it: chunks were on their way."""
        begin_s, end_s = self.longest
        return [one for one in ends if begin_s - ON_THE_WAY_S <= one.at_s <= end_s]


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


def gaps_told(found: list[Told], ends: list[Ended]) -> str:
    """The longest gaps with no end in them, with one and with more; what fell into the longest."""
    by_count: dict[int, Told] = {}
    for told in found:
        count = min(len(told.met(ends)), 2)
        if count not in by_count or told.gap_s > by_count[count].gap_s:
            by_count[count] = told
    named = ("no end", "one", "two or more")
    parts = [f"{by_count[n].gap_s:.2f} s with {named[n]}" for n in sorted(by_count)]
    worst = max(found, key=lambda told: told.gap_s)
    begin_s, _ = worst.longest
    fell = [f"{one.way} {one.at_s - begin_s:+.2f} s" for one in worst.met(ends)]
    where = ", ".join(fell) or "no end"
    return f"longest gaps: {', '.join(parts)}; in the longest ({worst.kind}): {where}"


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


async def measure(url: str, pid: int, args: argparse.Namespace) -> list[list[list[object]]]:
    """(a row for each way, against an undisturbed run; a row for each way, of the ends)."""
    await whole(url, args.replicas)
    fleet = Fleet(url, pid)
    expected, _ = await burst(fleet, args, args.streams)
    rows: list[list[object]] = [["undisturbed", *judge(expected, expected)]]
    _, alone = await burst(fleet, args, 0, "killed")
    ended = [[f"beside {args.clients} streams: killed", *row[1:]] for row in told_by_way(alone)]
    for way in args.ways:
        found, ends = await burst(fleet, args, args.streams, way)
        rows.append([f"one {way}", *judge(found, expected)])
        ended += [[f"… and {args.streams} at once: {way}", *row[1:]] for row in told_by_way(ends)]
    if args.minutes:
        each, ends = await in_turn(fleet, args, expected)
        found = [told for _, told in each]
        rows.append([f"{len(ends)} ended in turn, {args.clients} at once"])
        rows[-1] += judge(found, [expected[number] for number, _ in each])
        ended += [[f"in turn: {row[0]}", *row[1:]] for row in told_by_way(ends)]
        print(gaps_told(found, ends) + "\n")
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
    print(f"choosing among {args.replicas}: {choice_us(args.replicas):.1f} us a request")
    with serving(args.folder, *flags, "--max-queue=100000", "--max-queue-wait=600") as (url, pid):
        rows, ended = asyncio.run(measure(url, pid, args))
        print(memory_of(engines(pid)) + "\n")
    print(markdown(["", "complete", "tokens equal", "longest gap", "failures"], rows) + "\n")
    print(markdown(list(ENDED), ended))
    write_json(args.json, [rows, ended])


if __name__ == "__main__":
    main()
