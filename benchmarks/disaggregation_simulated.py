"""Prefill and decode apart beside chunked prefill in each engine, on eight simulated H100.

    python benchmarks/disaggregation_simulated.py [--loads long chat short] [--seconds 40]

Llama 3.1 8B in bf16; a step takes its bytes over 60% of 3,350 GB/s or its FLOPs over 50% of 989
TFLOP/s, whichever is longer, and 1.5 ms (`advise.simulate.truth.Roofline`): nobody has measured it.
Scheduler, caches, admission's choice, parcels and restores are the server's. For each way of
dividing the engines: the highest rate of requests of which 90% meet both objectives, by bisection,
and what `admit.split` would have chosen from the rates alone. With `--in-turns` a step takes its
bytes and its FLOPs one after the other: nothing of a chunk hides behind what answers read.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from common import markdown, write_json
from headway.admit.split import prefill_engines
from headway.advise.simulate.front import NO_FRONT
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.pools import Pools
from headway.advise.simulate.replica import Replica, Served
from headway.advise.simulate.truth import Reach, Roofline
from headway.bench.latency import latency
from headway.bench.prompts import IdWriter
from headway.bench.report import misses
from headway.core.cache_config import CacheConfig
from headway.core.model_spec import ModelSpec, spec_from_config
from headway.core.plan import Ceilings, Description
from headway.core.resolve import Settings
from headway.core.scheduler_config import SchedulerConfig
from headway.core.service import service_classes
from headway.core.slo import Slo
from headway.engine.cost import StepCost, Work, prior_of
from served import Kind, conversations, poisson_times

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
BANDWIDTH, FLOPS = 3350e9, 989e12
REACHED_BANDWIDTH, REACHED_FLOPS, FIXED_S = 0.6, 0.5, 1.5e-3
KV_BYTES, BLOCK = 56e9, 16
ENGINES, ATTAINMENT = 8, 0.9
SKIPPED = 0.3
"""Of the requests, while the engines fill."""
LOADS = {
    kind.name: kind
    for kind in (
        Kind(
            name="long",
            share=1.0,
            prompt="uniform:3584-4608",
            output="uniform:96-160",
            slo=Slo(ttft_s=1.0, tpot_s=0.05),
        ),
        Kind(
            name="chat",
            share=1.0,
            prompt="uniform:768-1280",
            output="uniform:192-320",
            slo=Slo(ttft_s=0.5, tpot_s=0.03),
        ),
        Kind(
            name="short",
            share=1.0,
            prompt="uniform:192-320",
            output="uniform:384-640",
            slo=Slo(ttft_s=1.0, tpot_s=0.015),
        ),
    )
}


def machine(spec: ModelSpec) -> Description:
    ceilings = Ceilings(bandwidth_bytes_per_s=BANDWIDTH, flops_per_s=FLOPS)
    return Description(device="cuda", ceilings=ceilings)


class InTurns(Roofline):
    """Nothing is computed while something is read."""

    def seconds(self, work: Work) -> float:
        tokens, sampled, attended, _ = work
        reads = replace(self, token_s=0.0, attended_s=0.0, sampled_s=0.0, fixed_s=0.0)
        computes_s = self.token_s * tokens + self.attended_s * attended + self.sampled_s * sampled
        return Roofline.seconds(reads, work) + computes_s + self.fixed_s if tokens else self.fixed_s


def truth(spec: ModelSpec, in_turns: bool) -> Roofline:
    prior = prior_of(spec, machine(spec), "bfloat16")
    return (InTurns if in_turns else Roofline)(
        weights_s=prior.weights_s / REACHED_BANDWIDTH,
        head_s=prior.any_sampled_s / REACHED_BANDWIDTH,
        read_s=prior.read_s / REACHED_BANDWIDTH,
        token_s=prior.token_s / REACHED_FLOPS,
        attended_s=prior.attended_s / REACHED_FLOPS,
        sampled_s=prior.sampled_s / REACHED_FLOPS,
        fixed_s=FIXED_S,
        reach=Reach((sys.maxsize,) * 4),
    )


def block_bytes(spec: ModelSpec) -> int:
    return BLOCK * sum(group.bytes_per_token("bfloat16") for group in spec.kv_groups)


def served(spec: ModelSpec, kind: Kind, policy: str, budget: int) -> Served:
    size = block_bytes(spec)
    settings = Settings(
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        attention_backend="none",
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        cache=CacheConfig(num_blocks=(int(KV_BYTES / size),), block_bytes=(size,)),
        threads=1,
        seed=0,
        scheduler=SchedulerConfig(policy=policy),
    )
    return Served(
        spec=spec,
        settings=settings,
        description=machine(spec),
        classes=service_classes([f"{kind.name}:{kind.slo}"]),
        max_queue=10**9,
        max_queue_wait_s=inf,
    )


@dataclass(frozen=True, slots=True)
class Way:
    """How the engines are used: `prefill` of them for prompts, 0: each does both."""

    name: str
    prefill: int = 0
    policy: str = "slo"
    budget: int = 8192


WAYS = [
    Way("chunks of 512, first come first served", policy="fcfs", budget=512),
    Way("chunks by the objectives"),
    *(Way(f"{p} prefill, {ENGINES - p} decode", p) for p in range(1, ENGINES)),
]


class House:
    """Worlds of one kind of load; an engine's cost model is learned once."""

    def __init__(self, kind: Kind, given: argparse.Namespace) -> None:
        self.kind, self.given = kind, given
        self.spec = replace(spec_from_config(LLAMA_8B, {}), eos_token_ids=())
        self.beliefs: dict[str, StepCost] = {}

    def replica(self, way: Way, number: int) -> Replica:
        shape = served(self.spec, self.kind, way.policy, way.budget)
        belief = self.beliefs.get(way.policy)
        made = Replica(
            replace(shape, belief=belief), truth(self.spec, self.given.in_turns), seed=number
        )
        if belief is None:
            self.beliefs[way.policy] = made.engine.cost
        return made

    def attained(self, way: Way, rate: float) -> float:
        """The share of requests that met both objectives, behind the first of them."""
        replicas = [self.replica(way, number) for number in range(ENGINES)]
        writer, clients = IdWriter(0), Clients(timeout_s=120.0)
        if way.prefill:
            link = self.given.link * 1e9
            world: World = Pools(
                *(replicas, way.prefill, NO_FRONT, writer, clients, 1), link_bytes_s=link
            )
        else:
            world = World(replicas, NO_FRONT, writer, clients, 1)
        count = max(int(rate * self.given.seconds), 40)
        found = world.run(conversations([self.kind], poisson_times(rate, count, 3), 3))
        judged = found[int(SKIPPED * count) :]
        good = [x for x in judged if not misses(self.kind.slo, x, latency(x))]
        return len(good) / len(judged)

    def best_rate(self, way: Way, guess: float) -> float:
        """The highest rate that keeps the attainment, requests/s."""
        low, high = 0.0, inf
        while high > (1 + self.given.precision) * low:
            if self.attained(way, guess) >= ATTAINMENT:
                low = guess
            else:
                high = guess
            if high < 0.05:
                return 0.0
            guess = (low * high) ** 0.5 if low and high < inf else (2 * low or high / 2)
        return low

    def asked(self, rate: float) -> tuple[float, float]:
        """(prefill, decode) engines that this rate asks for, by the roofline alone.

        A decode engine runs so many rows that a step takes the promised time.
        """
        took, kind = truth(self.spec, self.given.in_turns), self.kind
        prompt, answer = middle(kind.prompt), middle(kind.output)
        prefill_s = prompt * took.token_s + took.attended_s * prompt * (prompt + 1) / 2
        rows = 1
        context = prompt + answer // 2
        while rows < 256:
            more = rows + 1
            step_s = took.seconds(Work(more, more, more * context, more * context))
            if step_s > (kind.slo.tpot_s or inf):
                break
            rows = more
        step_s = took.seconds(Work(rows, rows, rows * context, rows * context))
        return rate * prefill_s, rate * answer * step_s / rows


def middle(length: str) -> int:
    """uniform:100-200 → 150."""
    low, high = length.rpartition(":")[2].split("-")
    return (int(low) + int(high)) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic in each trial")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between two engines")
    parser.add_argument("--ways", type=int, nargs="*", help="numbers of the ways, from 0")
    parser.add_argument("--precision", type=float, default=0.06, help="of a rate")
    parser.add_argument("--in-turns", action="store_true", help="no overlap within a step")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told: dict[str, dict[str, float]] = {}
    for name in given.loads:
        house = House(LOADS[name], given)
        asked = house.asked(1.0)
        guess, rows = 0.7 * ENGINES / sum(asked), []
        ways = WAYS if given.ways is None else [WAYS[number] for number in given.ways]
        found = {}
        for way in ways:
            bound = guess
            if way.prefill:
                fullest = max(asked[0] / way.prefill, asked[1] / (ENGINES - way.prefill))
                bound = 0.8 / fullest
            found[way.name] = house.best_rate(way, bound)
            print(
                f"{name}: {way.name}: {found[way.name]:.1f} requests/s", file=sys.stderr, flush=True
            )
        best = max(found.values()) or 1.0
        rows = [[way, f"{rate:.1f}", f"{rate / best:.2f}"] for way, rate in found.items()]
        chosen = prefill_engines(ENGINES, *asked)
        print(f"\n{name}: {LOADS[name].prompt} in, {LOADS[name].output} out, {LOADS[name].slo}")
        print(f"by the rates alone: {chosen} prefill, {ENGINES - chosen} decode "
              f"(a request asks {asked[0] * 1e3:.1f} and {asked[1] * 1e3:.1f} ms)\n")  # fmt: skip
        print(markdown(["way", "requests/s in both objectives", "of the best"], rows), flush=True)
        told[name] = {**found, "chosen": chosen}
    if given.json:
        write_json(given.json, told)
    print(json.dumps(told), file=sys.stderr)


if __name__ == "__main__":
    main()
