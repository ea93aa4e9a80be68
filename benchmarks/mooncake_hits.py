"""How much of Mooncake's conversations a prefix cache finds, by policy and capacity:

    python benchmarks/mooncake_hits.py --trace …/conversation_trace.jsonl --plot docs/mooncake.svg

The trace's prompts go through the real scheduler, KV book-keeping and prefix index, in blocks of
512 tokens as the trace has them, over an executor that computes nothing. Beside it stand a
simulation of the same policy written on its own, which must agree, and the optimum of who knows the
future: that keeps what is needed again soonest (Belady 1966). A block that a prompt needs again is
needed after those before it, so keeping by next use never breaks a chain and is the best there is.
"""

import argparse
import itertools
import json
import time
from collections import defaultdict
from heapq import heappop, heappush
from math import inf
from pathlib import Path

from headway.bench.traces import BLOCK_TOKENS, Row, read_mooncake
from headway.config.cache_config import CacheConfig
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.measure.chart import Panel, chart
from headway.runtime.null import NullExecutor

POLICIES = ("lru", "lfu", "cost")
ATTENTION_COST = 1.2e-4
LONGEST = 2**17
FEWEST_ALIKE = 4
"""Tokens of a block that are worth a copy of it."""


def prompt_of(row: Row) -> list[int]:
    """Token ids: 512 times each block's id, the last block cut off."""
    tokens: list[int] = []
    for block in row.blocks:
        tokens += [block] * min(BLOCK_TOKENS, row.prompt_tokens - len(tokens))
    return tokens


def engine_of(capacity: int, policy: str, at_once: int, block_tokens: int = BLOCK_TOKENS) -> Engine:
    """A real engine with a cache of `capacity` blocks, over a runtime that computes nothing."""
    settings = Settings(
        device="null",
        dtype="bfloat16",
        load_format="dummy",
        attention_backend="none",
        max_model_len=LONGEST,
        max_num_seqs=at_once,
        max_num_batched_tokens=LONGEST * at_once,
        cache=CacheConfig(
            block_size=block_tokens,
            num_blocks=(capacity + 1,),
            prefix_cache=policy,
            attention_cost=ATTENTION_COST,
        ),
        threads=1,
        seed=0,
        scheduler=SchedulerConfig(policy="fcfs"),
    )
    return Engine(NullExecutor(), settings, vocab_size=2**31 - 1, eos_token_ids=())


def engine_hits(rows: list[Row], capacity: int, policy: str, at_once: int) -> float:
    """Share of prompt tokens that the real cache of `capacity` blocks finds."""
    engine = engine_of(capacity, policy, at_once)
    queried = cached = 0
    waiting = list(enumerate(rows))[::-1]
    while waiting or engine.has_work:
        while waiting and engine.num_requests < at_once:
            number, row = waiting.pop()
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            engine.add(Request(number, prompt_of(row), sampling))
        _, record = engine.step()
        queried += record.num_queried_tokens
        cached += record.num_cached_tokens
    engine.check_integrity()
    return cached / queried


class Simulation:
    """One cache, one request at a time; `value` of a block when it is released, least first out."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.empty = capacity
        self.policy = policy
        self.floor, self.clock = 0.0, itertools.count()
        self.uses: dict[tuple, float] = {}
        """Block → how often it was used, for the blocks that are cached; of one that is filled in
        part the first use counts in part."""
        self.idle: dict[tuple, tuple[float, int]] = {}
        self.children: dict[tuple | None, int] = defaultdict(int)
        self.heap: list[tuple[float, int, tuple]] = []

    def value(self, block: tuple, next_use: float) -> float:
        at = block[1] * BLOCK_TOKENS
        weight = self.uses[block] * (1 + ATTENTION_COST * at if self.policy == "cost" else 1)
        return {"lru": 0.0, "optimum": -next_use}.get(self.policy, self.floor + weight)

    def offer(self, block: tuple) -> None:
        if not self.children[block]:
            heappush(self.heap, (*self.idle[block], block))

    def wake(self, block: tuple, parent: tuple | None) -> None:
        """It is idle no more."""
        del self.idle[block]
        self.children[parent] -= 1
        if parent in self.idle:
            self.offer(parent)

    def take(self, parents: dict[tuple, tuple | None]) -> None:
        """Make one block empty for somebody's use."""
        if self.empty:
            self.empty -= 1
            return
        while True:
            value, moment, block = heappop(self.heap)
            if self.idle.get(block) == (value, moment) and not self.children[block]:
                break
        self.floor = max(self.floor, value)
        self.wake(block, parents[block])
        del self.uses[block]

    def rest(self, block: tuple, parent: tuple | None, next_use: dict[tuple, float]) -> None:
        """It is idle: nobody uses it any more."""
        self.idle[block] = self.value(block, next_use[block]), next(self.clock)
        self.children[parent] += 1
        self.offer(block)

    def request(
        self,
        chain: list[tuple],
        part: tuple | None,
        num_tokens: int,
        parents: dict[tuple, tuple | None],
        next_use: dict[tuple, float],
    ) -> int:
        """Tokens found of a prompt whose full blocks are `chain`, and the last, filled in part,
        `part`, where it is of use. Who finds that goes on in a copy."""
        found = 0
        while found < len(chain) and chain[found] in self.uses:
            found += 1
        hit = chain[:found]
        for block in hit:
            self.uses[block] += 1
            self.wake(block, parents[block])
        whole = found * BLOCK_TOKENS == num_tokens
        fresh = -(-num_tokens // BLOCK_TOKENS) - found + whole
        has_part = part in self.uses
        if part is not None and has_part:
            self.uses[part] += 1
            self.wake(part, parents[part])
            fresh -= 1
            self.take(parents)
            self.empty += 1
            self.rest(part, parents[part], next_use)
        for _ in range(fresh):
            self.take(parents)
        listed = chain[found:]
        for block in listed:
            self.uses[block] = 1
        if part is not None and not has_part:
            self.uses[part] = part[2] / BLOCK_TOKENS
            listed = [*listed, part]
            self.rest(part, parents[part], next_use)
        self.empty += fresh - len(listed)
        for block in reversed(chain):
            self.rest(block, parents[block], next_use)
        more = part[2] if part is not None and has_part else 0
        return min(found * BLOCK_TOKENS + more, num_tokens - 1)


def simulated_hits(rows: list[Row], capacity: int, policy: str) -> float:
    """The same share by a simulation; policy `optimum` knows the future."""
    chains: list[list[tuple]] = []
    parts: list[tuple | None] = []
    parents: dict[tuple, tuple | None] = {}
    uses: dict[tuple, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        full = row.prompt_tokens // BLOCK_TOKENS
        chain = [(block, depth) for depth, block in enumerate(row.blocks[:full])]
        count = row.prompt_tokens % BLOCK_TOKENS
        parts.append((row.blocks[full], full, count) if count > FEWEST_ALIKE else None)
        for before, block in itertools.pairwise([None, *chain, *filter(None, parts[-1:])]):
            assert parents.setdefault(block, before) == before, "an id with two histories"
            uses[block].append(number)
        chains.append(chain)
    upcoming = {block: iter([*when[1:], inf]) for block, when in uses.items()}
    simulation, found = Simulation(capacity, policy), 0
    for row, chain, part in zip(rows, chains, parts, strict=True):
        used = [*chain, *filter(None, [part])]
        next_use = {block: float(next(upcoming[block])) for block in used}
        found += simulation.request(chain, part, row.prompt_tokens, parents, next_use)
    return found / sum(row.prompt_tokens for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=None, help="the first so many; all")
    parser.add_argument("--tokens", default="1m,3m,10m,30m,100m", help="capacities")
    parser.add_argument("--at-once", type=int, default=1, help="requests in the engine together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    rows = read_mooncake(given.trace)[: given.requests]
    rows = [row for row in rows if row.prompt_tokens < LONGEST - 1]
    print(f"{len(rows)} requests, {sum(r.prompt_tokens for r in rows) / 1e6:.1f} M prompt tokens")
    print(f"{'tokens':>8} {'policy':>8} {'engine':>8} {'offline':>8} {'apart':>7} {'optimum':>8}")
    results = []
    for text in given.tokens.split(","):
        tokens = float(text.removesuffix("m")) * 1e6
        capacity = int(tokens / BLOCK_TOKENS)
        best = simulated_hits(rows, capacity, "optimum")
        for policy in POLICIES:
            began = time.perf_counter()
            real = engine_hits(rows, capacity, policy, given.at_once)
            offline = simulated_hits(rows, capacity, policy)
            took_s = time.perf_counter() - began
            print(
                f"{text:>8} {policy:>8} {real:>8.2%} {offline:>8.2%} "
                f"{100 * (real - offline):>+7.2f} {best:>8.2%}   {took_s:.0f} s",
                flush=True,
            )
            results.append(
                {"tokens": tokens, "policy": policy, "engine": real, "offline": offline,
                 "optimum": best}
            )  # fmt: skip
    apart = max(abs(r["engine"] - r["offline"]) for r in results)
    print(f"engine and simulation are at most {100 * apart:.2f} points apart (target 1)")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    if given.plot:
        lines = {
            policy: [(r["tokens"], 100 * r["engine"]) for r in results if r["policy"] == policy]
            for policy in POLICIES
        }
        lines["optimum"] = [(r["tokens"], 100 * r["optimum"]) for r in results[:: len(POLICIES)]]
        panel = Panel(
            title="Mooncake conversations: prompt tokens found",
            x="tokens of KV",
            y="%",
            lines=lines,
            log_x=True,
        )
        given.plot.write_text(chart([panel]))


if __name__ == "__main__":
    main()
