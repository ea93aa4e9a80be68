"""Static, dynamic and continuous batching under the same load: `python benchmarks/batching.py`.

A Llama shape with random weights, whose steps cost what such a model costs here, answers requests
whose prompts and answers have 16 to 256 tokens. First each rule empties a full queue: what it can
do. Then requests come at three rates (below, near and above what static batching can do), at random
moments that are the same for each rule and do not wait for answers. The rules take turns on one
model in one process. Time is what one thread has computed, and idle moments are skipped, so other
work on the machine does not count.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import heading
from headway.assemble import make_executor
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.core.clock import SystemClock
from headway.core.plan import Executor
from headway.core.request import Request, SamplingParams
from headway.engine.batching import BATCHING
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.planning import plan_settings

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
SHORTEST, LONGEST = 16, 256
SHARES_OF_CAPACITY = {"below": 0.5, "near": 0.9, "above": 1.3}
LOOSE_TTFT_S = 5.0
QUEUE_BATCHES = 6


class ComputingClock(SystemClock):
    """Seconds this process has computed, and those it would have waited."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.process_time() + self._waited_s

    def wait(self, seconds: float) -> None:
        self._waited_s += max(seconds, 0.0)


@dataclass(slots=True, kw_only=True)
class Call:
    """One request: what is asked, and when its tokens came, in seconds from the start."""

    at_s: float
    prompt: list[int]
    num_tokens: int
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.at_s

    @property
    def e2e_s(self) -> float:
        return self.times_s[-1] - self.at_s

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / (len(self.times_s) - 1)


@dataclass(slots=True, kw_only=True)
class Played:
    """What one rule made of a load: its calls, the rows of each step, the time until the end."""

    calls: list[Call] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    window_s: float = 0.0
    spent_s: float = 0.0

    def add(self, other: "Played") -> None:
        self.calls += other.calls
        self.rows += other.rows
        self.step_s += other.step_s
        self.window_s += other.window_s
        self.spent_s += other.spent_s


def length(draw: random.Random) -> int:
    """16 to 256, each octave as likely as the next: many short, few long, 87 on average."""
    return round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))


def call(draw: random.Random, at_s: float) -> Call:
    prompt = [draw.randrange(SHAPE["vocab_size"]) for _ in range(length(draw))]
    return Call(at_s=at_s, prompt=prompt, num_tokens=length(draw))


def poisson(rate_per_s: float, window_s: float, seed: int) -> list[Call]:
    """Calls of one window: gaps are exponential, drawn beforehand."""
    draw = random.Random(seed)
    calls, at_s = [], draw.expovariate(rate_per_s)
    while at_s < window_s:
        calls.append(call(draw, at_s))
        at_s += draw.expovariate(rate_per_s)
    return calls


def play(
    executor: Executor,
    settings: Settings,
    calls: Iterable[Call],
    window_s: float,
    clock: ComputingClock,
) -> Played:
    """Run the load to its last token; after the last call no batch waits to fill."""
    vocab_size = SHAPE["vocab_size"]
    engine = build_engine(executor, settings, vocab_size=vocab_size, eos_token_ids=(), clock=clock)
    played = Played(calls=list(calls), window_s=window_s)
    pending = deque(enumerate(played.calls, 1))
    by_id = dict(pending)
    start_s = clock.now_s()
    while pending or engine.has_work:
        now_s = clock.now_s() - start_s
        while pending and pending[0][1].at_s <= now_s:
            request_id, arrived = pending.popleft()
            sampling = SamplingParams(temperature=0, max_tokens=arrived.num_tokens, ignore_eos=True)
            engine.add(Request(request_id, arrived.prompt, sampling))
            if not pending:
                engine.flush()
        if not engine.has_work:
            next_s = min(pending[0][1].at_s, engine.wakes_at_s - start_s)
            clock.wait(next_s - (clock.now_s() - start_s))
            continue
        step(engine, played, by_id, start_s)
    played.spent_s = clock.now_s() - start_s
    return played


def step(engine: Engine, played: Played, by_id: dict[int, Call], start_s: float) -> None:
    """One step; its tokens are dated when it ends."""
    before_s = engine.clock.now_s()
    updates, record = engine.step()
    now_s = engine.clock.now_s()
    if record.num_tokens:
        played.rows.append(record.num_sampled)
        played.step_s.append(now_s - before_s)
    for update in updates:
        by_id[update.request_id].times_s += [now_s - start_s] * len(update.token_ids)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(slots=True)
class Figures:
    """A row of the table; tokens that came within the window, requests that arrived in it."""

    tokens_per_s: float
    ttft_s: tuple[float, float]
    tpot_s: float
    e2e_s: tuple[float, float]
    goodput_per_s: float
    good_share: float
    loose_per_s: float


def figures(played: Played, window_s: float, ttft_slo_s: float, tpot_slo_s: float) -> Figures:
    """What `played`, several windows of `window_s`, comes to under the objectives."""
    calls = played.calls
    ttfts = [c.ttft_s for c in calls]
    e2es = [c.e2e_s for c in calls]
    good = sum(c.ttft_s <= ttft_slo_s and c.tpot_s <= tpot_slo_s for c in calls)
    loose = sum(c.ttft_s <= LOOSE_TTFT_S and c.tpot_s <= tpot_slo_s for c in calls)
    in_time = sum(at_s <= window_s for c in calls for at_s in c.times_s)
    return Figures(
        in_time / played.window_s,
        (percentile(ttfts, 0.5), percentile(ttfts, 0.95)),
        percentile([c.tpot_s for c in calls], 0.95),
        (percentile(e2es, 0.5), percentile(e2es, 0.95)),
        good / played.window_s,
        good / len(calls),
        loose / played.window_s,
    )


def load(max_num_seqs: int) -> tuple[Executor, Settings]:
    """The model of `SHAPE`, random, and the settings it runs with."""
    options = EngineOptions(load_format="dummy", device="cpu", max_num_seqs=max_num_seqs, threads=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        spec, settings, _, machine = plan_settings(folder, options)
        executor = make_executor(folder, options, spec, settings, machine, None)
    print(
        f"{spec.num_parameters / 1e6:.1f}M parameters in {settings.dtype}, one thread, ",
        end="",
    )
    print(f"batches of {max_num_seqs}", flush=True)
    return executor, settings


def full_queue(
    executor: Executor, settings: dict[str, Settings], clock: ComputingClock
) -> dict[str, Played]:
    """Everything is there at once: what each rule can do at most."""
    columns = ("requests/s", "tokens/s", "rows a step", "ms a step")
    print(f"\n{heading(['a full queue', *columns])}")
    found = {}
    for rule, chosen in settings.items():
        draw = random.Random(0)
        calls = [call(draw, 0.0) for _ in range(QUEUE_BATCHES * chosen.max_num_seqs)]
        played = found[rule] = play(executor, chosen, calls, 0.0, clock)
        tokens = sum(len(c.times_s) for c in played.calls) / played.spent_s
        rows, step_s = statistics.mean(played.rows), statistics.mean(played.step_s)
        requests = len(played.calls) / played.spent_s
        print(
            f"| {rule} | {requests:.2f} | {tokens:.0f} | {rows:.1f} | {step_s * 1e3:.1f} |",
            flush=True,
        )
    return found


def in_turn(settings: dict[str, Settings], repeat: int) -> list[str]:
    """The rules, beginning with another one each time."""
    rules = list(settings)
    first = repeat % len(rules)
    return rules[first:] + rules[:first]


def open_loop(
    executor: Executor,
    settings: dict[str, Settings],
    rate_per_s: float,
    window_s: float,
    repeats: int,
    clock: ComputingClock,
) -> dict[str, Played]:
    """Each rule under the same arrivals, in turns that begin with another one each time."""
    found = {rule: Played() for rule in settings}
    for repeat in range(repeats):
        for rule in in_turn(settings, repeat):
            calls = poisson(rate_per_s, window_s, seed=repeat)
            found[rule].add(play(executor, settings[rule], calls, window_s, clock))
    return found


def print_rows(name: str, rate_per_s: float, found: dict[str, Figures]) -> None:
    for rule, row in found.items():
        ratio = row.goodput_per_s / max(found["static"].goodput_per_s, 1e-9)
        print(
            f"| {name}, {rate_per_s:.2f}/s | {rule} | {row.tokens_per_s:.0f} | "
            f"{row.ttft_s[0]:.2f} / {row.ttft_s[1]:.2f} | {row.tpot_s * 1e3:.0f} | "
            f"{row.e2e_s[0]:.2f} / {row.e2e_s[1]:.2f} | {row.goodput_per_s:.2f} | "
            f"{row.good_share:.0%} | {ratio:.1f} | {row.loose_per_s:.2f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals, per run")
    parser.add_argument("--repeats", type=int, default=2, help="other arrivals each time")
    parser.add_argument("--window", type=float, default=0.05, help="of dynamic batching, seconds")
    parser.add_argument("--ttft", type=float, default=1.0, help="objective, seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="objective, seconds")
    chosen = parser.parse_args()

    executor, base = load(chosen.max_num_seqs)
    clock = ComputingClock()
    rules = {
        rule: replace(base.scheduler, batching=rule, batch_window_s=chosen.window)
        for rule in BATCHING
    }
    settings = {rule: replace(base, scheduler=scheduler) for rule, scheduler in rules.items()}
    play(
        executor,
        settings["continuous"],
        [call(random.Random(9), 0.0) for _ in range(4)],
        0.0,
        clock,
    )
    static = full_queue(executor, settings, clock)["static"]
    capacity = len(static.calls) / static.spent_s

    print(f"\nSLO: TTFT ≤ {chosen.ttft:g} s and TPOT ≤ {chosen.tpot * 1e3:g} ms; loose: ", end="")
    print(f"TTFT ≤ {LOOSE_TTFT_S:g} s. {chosen.repeats} × {chosen.seconds:g} s of arrivals.\n")
    latencies = ("TTFT p50 / p95, s", "TPOT p95, ms", "e2e p50 / p95, s")
    goods = ("goodput, requests/s", "of all", "× static", "loose goodput")
    print(heading(["load", "rule", "tok/s", *latencies, *goods]))
    for name, share in SHARES_OF_CAPACITY.items():
        played = open_loop(
            executor, settings, share * capacity, chosen.seconds, chosen.repeats, clock
        )
        rate = len(played["static"].calls) / played["static"].window_s
        found = {
            rule: figures(p, chosen.seconds, chosen.ttft, chosen.tpot) for rule, p in played.items()
        }
        print_rows(name, rate, found)


if __name__ == "__main__":
    main()
