"""Prefill and decode apart beside chunked prefill in each engine, on eight simulated H100.

    python benchmarks/disaggregation_simulated.py [--loads long chat short] [--seconds 40]
    python benchmarks/disaggregation_simulated.py --loads short --rates 75 94 103 112 [--ways 3 4]

Llama 3.1 8B in bf16; a step takes its bytes over 60% of 3,350 GB/s or its FLOPs over 50% of 989
TFLOP/s, whichever is longer, and 1.5 ms (`advise.simulate.truth.Roofline`): nobody has measured it.
Scheduler, caches, admission's choice, parcels and restores are the server's. For each way of
dividing the engines: the highest rate of requests of which 90% meet both objectives, by bisection,
and what `admit.split` would have chosen from the rates alone. With `--rates` no rate is searched:
the share of requests that meet both objectives at each of these. With `--in-turns` a step takes its
bytes and its FLOPs one after the other: nothing of a chunk hides behind what answers read.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from common import markdown, write_json
from headway.admit.split import prefill_engines
from headway.advise.simulate.truth import Roofline
from headway.bench.workload import Conversation
from headway.core.slo import Slo
from headway.perf.model import Work
from literature.fleet import House, Way, shares, truth
from served import Kind, conversations, poisson_times

ENGINES = 8
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


class InTurns(Roofline):
    """Nothing is computed while something is read."""

    def seconds(self, work: Work) -> float:
        tokens, sampled, attended, _ = work
        reads = replace(self, token_s=0.0, attended_s=0.0, sampled_s=0.0, fixed_s=0.0)
        computes_s = self.token_s * tokens + self.attended_s * attended + self.sampled_s * sampled
        return Roofline.seconds(reads, work) + computes_s + self.fixed_s if tokens else self.fixed_s


WAYS = [
    Way("chunks of 512, first come first served", policy="fcfs", budget=512),
    Way("chunks by the objectives"),
    *(Way(f"{p} prefill, {ENGINES - p} decode", p) for p in range(1, ENGINES)),
]


def talks(kind: Kind, rate: float, count: int) -> list[Conversation]:
    """The same arrivals for each way of dividing the engines."""
    return conversations([kind], poisson_times(rate, count, 3), 3)


def house_of(kind: Kind, given: argparse.Namespace) -> House:
    """Worlds of one kind of load."""
    return House(
        name=kind.name,
        slo=kind.slo,
        talks=partial(talks, kind),
        engines=ENGINES,
        seconds=given.seconds,
        precision=given.precision,
        link_bytes_s=given.link * 1e9,
        truth_of=partial(truth, kind=InTurns if given.in_turns else Roofline),
    )


def middle(length: str) -> int:
    """uniform:100-200 → 150."""
    low, high = length.rpartition(":")[2].split("-")
    return (int(low) + int(high)) // 2


def searched(house: House, ways: list[Way], asked: tuple[float, float]) -> dict[str, list[float]]:
    """The highest rate of each way that keeps the attainment."""
    found = {}
    for way in ways:
        bound = 0.7 * ENGINES / sum(asked)
        if way.prefill:
            bound = 0.8 / max(asked[0] / way.prefill, asked[1] / (ENGINES - way.prefill))
        found[way.name] = [house.best_rate(way, bound)[0]]
        told(house, way, found[way.name])
    return found


def shared(house: House, ways: list[Way], rates: list[float]) -> dict[str, list[float]]:
    """The share of requests in both objectives, of each way at each of the rates."""
    found = {}
    for way in ways:
        found[way.name] = [house.attained(way, rate) for rate in rates]
        told(house, way, found[way.name])
    return found


def told(house: House, way: Way, figures: list[float]) -> None:
    """What was found of a way, for who waits."""
    print(f"{house.name}: {way.name}: {figures}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic in each trial")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between two engines")
    parser.add_argument("--ways", type=int, nargs="*", help="numbers of the ways, from 0")
    parser.add_argument("--precision", type=float, default=0.06, help="of a rate")
    parser.add_argument("--rates", type=float, nargs="*", help="requests/s; none is searched")
    parser.add_argument("--in-turns", action="store_true", help="no overlap within a step")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ways = WAYS if given.ways is None else [WAYS[number] for number in given.ways]
    figures: dict[str, dict[str, object]] = {}
    for name in given.loads:
        kind, house = LOADS[name], house_of(LOADS[name], given)
        took = truth(house.spec, InTurns if given.in_turns else Roofline)
        lengths = middle(kind.prompt), middle(kind.output)
        asked = shares(took, lengths, kind.slo.tpot_s or inf, 1.0)
        if given.rates:
            found = shared(house, ways, given.rates)
            columns = ["in both objectives at requests/s", *(f"{rate:g}" for rate in given.rates)]
            rows = [[way, *(f"{share:.0%}" for share in each)] for way, each in found.items()]
        else:
            found = searched(house, ways, asked)
            best = max(found.values())[0] or 1.0
            columns = ["way", "requests/s in both objectives", "of the best"]
            rows = [[way, f"{rate:.1f}", f"{rate / best:.2f}"] for way, (rate,) in found.items()]
        chosen = prefill_engines(ENGINES, *asked)
        print(f"\n{name}: {kind.prompt} in, {kind.output} out, {kind.slo}")
        print(f"by the rates alone: {chosen} prefill, {ENGINES - chosen} decode "
              f"(a request asks {asked[0] * 1e3:.1f} and {asked[1] * 1e3:.1f} ms)\n")  # fmt: skip
        print(markdown(columns, rows), flush=True)
        figures[name] = {**found, "chosen": chosen}
    if given.json:
        write_json(given.json, figures)
    print(json.dumps(figures), file=sys.stderr)


if __name__ == "__main__":
    main()
