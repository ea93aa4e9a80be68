"""What several engines find of recorded conversations, by how one of them is chosen:

    python benchmarks/replica_hits.py --trace …/conversation_trace.jsonl [--replicas 4]
    python benchmarks/replica_hits.py --sharegpt …/sharegpt….jsonl --tokens 0.4

The requests go through real schedulers and caches, in blocks of 512 tokens as Mooncake's trace has
them, over executors that compute nothing. ShareGPT's chats come in four turns, a quarter of
its prompt, half, three quarters, all of it; whose turn it is is drawn, and blocks are of 16.
One engine has all the memory, or each of several a part of it. `admission` is the choice of
`headway serve --replicas` (admit/lines.py), `gateway` that of `headway gateway` (policy time), each
with as many requests open as `--open` says; the load of an engine is the prompt tokens that it had
to compute.
"""

import argparse
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from common import markdown, write_json
from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lines import Line, Lines
from headway.admit.queue import QueueOrder
from headway.admit.seen import Seen
from headway.bench.traces import BLOCK_TOKENS, read_mooncake, read_sharegpt
from headway.core.clock import VirtualClock
from headway.core.records import BEFORE_ANY
from headway.core.request import Request, SamplingParams
from headway.edge.relayed import LoadReport
from headway.gateway.choose import Pool, RoutingQuery, uncached
from headway.gateway.config import UpstreamRow
from headway.gateway.prefix import PAGE_BYTES, page_keys
from headway.gateway.speed import Flight
from headway.gateway.upstream import Upstream
from mooncake_hits import LONGEST, engine_of, prompt_of

TOKEN_S = 1e-4
TOKEN_BYTES = 4
"""Of a token id, where prompts are compared in bytes."""
TURNS, CHAT_BLOCK_TOKENS = 4, 16
Choice = Callable[[list[int]], int]


def admission(count: int, held_tokens: int, num_open: int) -> Choice:
    """Admission's own choice, told of each request when it is `num_open` others old."""
    clock = VirtualClock()
    lines = Lines(
        [
            Line(Forecast(clock, order=QueueOrder.DEADLINE, lane_share=0.5), Seen())
            for _ in range(count)
        ]
    )
    for engine in range(count):
        lines.on_began(engine, held_tokens)
        record = type(BEFORE_ANY)(**BEFORE_ANY_FIELDS, prefill_s_per_token=TOKEN_S, engine=engine)
        lines.on_record(record)
    opened: deque[QueueEntry] = deque()

    def choose(prompt: list[int]) -> int:
        if len(opened) >= num_open:
            lines.leave(opened.popleft())
        entry = QueueEntry()
        lines.enter(entry)
        lines.place(entry, [len(prompt)], "", [prompt])
        line = lines.line_of(entry)
        line.forecast.began(entry, 0)
        assert line.seen is not None
        line.seen.add("", prompt)
        opened.append(entry)
        return entry.engine

    return choose


def gateway(count: int, held_tokens: int, num_open: int) -> Choice:
    """The gateway's, which compares prompts in pages of bytes; the same is told of requests."""
    clock = VirtualClock()
    upstreams = []
    for engine in range(count):
        upstream = Upstream(UpstreamRow(url="http://127.0.0.1/v1", name=str(engine)), clock)
        upstream.speed.bytes_per_token = TOKEN_BYTES
        upstream.speed.take(LoadReport(token_s=TOKEN_S, max_rows=num_open, boot="1"))
        upstream.pages.max_pages = held_tokens * TOKEN_BYTES // PAGE_BYTES
        upstreams.append(upstream)
    pool = Pool(upstreams)
    opened: deque[tuple[Upstream, Flight]] = deque()

    def choose(prompt: list[int]) -> int:
        if len(opened) >= num_open:
            first, flight = opened.popleft()
            first.speed.end(flight)
        data = array("I", prompt).tobytes()
        asked = RoutingQuery(model="", keys=page_keys("", data), num_bytes=len(data), answer=1)
        chosen = pool.choose(asked)
        assert chosen is not None
        flight = chosen.speed.begin(uncached(chosen, asked), asked.answer)
        chosen.speed.began(flight)
        chosen.pages.add(list(asked.keys))
        opened.append((chosen, flight))
        return int(chosen.name)

    return choose


BEFORE_ANY_FIELDS = {name: getattr(BEFORE_ANY, name) for name in BEFORE_ANY.__struct_fields__[:9]}


def at_random(count: int) -> Choice:
    source = random.Random(1)
    return lambda prompt: source.randrange(count)


def in_turn(count: int) -> Choice:
    numbers: Iterator[int] = iter(range(10**9))
    return lambda prompt: next(numbers) % count


def turns_of(prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt in growing parts, those of one in order, whoever's turn comes when."""
    order, asked = [number for number in range(len(prompts)) for _ in range(TURNS)], []
    random.Random(1).shuffle(order)
    turns = [0] * len(prompts)
    for number in order:
        turns[number] += 1
        asked.append(prompts[number][: max(1, len(prompts[number]) * turns[number] // TURNS)])
    return asked


def run(
    prompts: list[list[int]], count: int, held_tokens: int, block_tokens: int, choose: Choice
) -> tuple[float, float]:
    """(share of prompt tokens found, the busiest engine's load beside the mean)."""
    capacity = held_tokens // block_tokens
    engines = [engine_of(capacity, "cost", 1, block_tokens) for _ in range(count)]
    queried = cached = 0
    computed = [0] * count
    for number, prompt in enumerate(prompts):
        chosen = choose(prompt)
        engine = engines[chosen]
        engine.add(Request(number, prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        while engine.has_work:
            _, record = engine.step()
            queried += record.num_queried_tokens
            cached += record.num_cached_tokens
            computed[chosen] += record.num_queried_tokens - record.num_cached_tokens
    return cached / queried, max(computed) / (sum(computed) / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="Mooncake's")
    source.add_argument("--sharegpt", type=Path)
    parser.add_argument("--requests", type=int, default=1000, help="the first so many")
    parser.add_argument("--tokens", type=float, default=10, help="of KV in all, in millions")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--open", type=int, default=32, help="requests at once, in all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = BLOCK_TOKENS if given.trace else CHAT_BLOCK_TOKENS
    if given.trace:
        rows = [r for r in read_mooncake(given.trace) if r.prompt_tokens < LONGEST - 1]
        prompts = [prompt_of(row) for row in rows[: given.requests]]
    else:
        rows = read_sharegpt(given.sharegpt)[: given.requests // TURNS]
        prompts = turns_of([list(row.ids) for row in rows])
    whole, count = int(given.tokens * 1e6), given.replicas
    part = whole // count
    found = [("one engine", *run(prompts, 1, whole, size, lambda prompt: 0))]
    choices = {
        "admission": admission(count, part, given.open),
        "gateway": gateway(count, part, given.open),
        "in turn": in_turn(count),
        "at random": at_random(count),
    }
    for name, choose in choices.items():
        found.append((f"{count}, {name}", *run(prompts, count, part, size, choose)))
    best = found[0][1]
    cells = [[n, f"{s:.2%}", f"{s / best:.2f}", f"{load:.2f}"] for n, s, load in found]
    print(markdown(["engines", "tokens found", "of one engine's", "busiest / mean"], cells))
    write_json(given.json, found)


if __name__ == "__main__":
    main()
