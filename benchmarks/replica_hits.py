"""What several engines find of Mooncake's conversations, by how one of them is chosen:

    python benchmarks/replica_hits.py --trace …/conversation_trace.jsonl [--replicas 4]

The requests go through real schedulers and caches, in blocks of 512 tokens as the trace has them,
over executors that compute nothing. One engine has all the memory, or each of several a part of it.
`ours` is admission's own choice (admit/lines.py), with as many requests open as `--open` says; the
load of an engine is the prompt tokens that it had to compute.
"""

import argparse
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from common import markdown, write_json
from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lines import Line, Lines
from headway.admit.queue import QueueOrder
from headway.admit.seen import Seen
from headway.bench.traces import BLOCK_TOKENS, Row, read_mooncake
from headway.core.clock import VirtualClock
from headway.core.request import Request, SamplingParams
from headway.telemetry.records import BEFORE_ANY
from mooncake_hits import LONGEST, engine_of, prompt_of

TOKEN_S = 1e-4
Choice = Callable[[list[int]], int]


def ours(count: int, capacity: int, num_open: int) -> Choice:
    """Admission's own choice, told of each request when it is `num_open` others old."""
    clock = VirtualClock()
    lines = Lines(
        [
            Line(Forecast(clock, order=QueueOrder.DEADLINE, lane_share=0.5), Seen())
            for _ in range(count)
        ]
    )
    for engine in range(count):
        lines.on_began(engine, capacity * BLOCK_TOKENS)
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


BEFORE_ANY_FIELDS = {name: getattr(BEFORE_ANY, name) for name in BEFORE_ANY.__struct_fields__[:9]}


def at_random(count: int) -> Choice:
    source = random.Random(1)
    return lambda prompt: source.randrange(count)


def in_turn(count: int) -> Choice:
    numbers: Iterator[int] = iter(range(10**9))
    return lambda prompt: next(numbers) % count


def run(rows: list[Row], count: int, capacity: int, choose: Choice) -> tuple[float, float]:
    """(share of prompt tokens found, the busiest engine's load beside the mean)."""
    engines = [engine_of(capacity, "cost", 1) for _ in range(count)]
    queried = cached = 0
    computed = [0] * count
    for number, row in enumerate(rows):
        prompt = prompt_of(row)
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
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000, help="the first so many")
    parser.add_argument("--tokens", type=float, default=10, help="of KV in all, in millions")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--open", type=int, default=32, help="requests at once, in all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [r for r in read_mooncake(given.trace) if r.prompt_tokens < LONGEST - 1]
    rows = rows[: given.requests]
    whole, count = int(given.tokens * 1e6 / BLOCK_TOKENS), given.replicas
    part = whole // count
    found = [("one engine", *run(rows, 1, whole, lambda prompt: 0))]
    choices = {
        "ours": ours(count, part, given.open),
        "in turn": in_turn(count),
        "at random": at_random(count),
    }
    for name, choose in choices.items():
        found.append((f"{count}, {name}", *run(rows, count, part, choose)))
    best = found[0][1]
    cells = [[n, f"{s:.2%}", f"{s / best:.2f}", f"{load:.2f}"] for n, s, load in found]
    print(markdown(["engines", "tokens found", "of one engine's", "busiest / mean"], cells))
    write_json(given.json, found)


if __name__ == "__main__":
    main()
