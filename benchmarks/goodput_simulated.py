"""Goodput of the policies on a virtual clock: the server's engine and admission, nothing else.

    python benchmarks/goodput_simulated.py [--rates 0.3 0.5 …] [--policies fcfs slo] [--requests N]

The mix is that of `goodput.py`: 80% chats (100 to 200 tokens in, 60 to 100 out), 15% with one
system prompt of 1,500 tokens before, 5% of 4,000 tokens; Poisson. The seconds of a step are those
of Qwen2.5-0.5B in int8 on two cores without VNNI: 20 ms for the weights, 3 ms a token, 0.7 µs a
token attended. `--open-door` leaves admission out: everybody is let in. An hour of traffic takes
seconds; the tables of real runs are in docs/slo.md.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from math import inf

from headway.advise.simulate.front import Front
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.replica import Replica, Served
from headway.advise.simulate.truth import Reach
from headway.bench.latency import latency
from headway.bench.prompts import IdWriter
from headway.bench.report import misses
from headway.config.cache_config import CacheConfig
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.plan import Description
from headway.core.service import service_classes
from headway.measure.record import Exchange
from headway.perf.model import Work
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from served import MIX, conversations, poisson_times

WEIGHTS_S, TOKEN_S, ATTENDED_S, READ_S = 0.020, 3.0e-3, 0.7e-6, 0.5e-6


class Steps:
    """The seconds of that machine."""

    label = "formula"

    def __init__(self) -> None:
        self.reach = Reach((sys.maxsize,) * 4)

    def seconds(self, work: Work) -> float:
        tokens, _, attended, read = work
        if not tokens:
            return 1e-4
        return WEIGHTS_S + TOKEN_S * tokens + ATTENDED_S * attended + READ_S * read


def served(policy: str, budget: int, given: argparse.Namespace) -> Served:
    """The server of docs/slo.md: 64 rows, told what each kind of request was promised."""
    scheduler = SchedulerConfig(policy=policy, lane_share=given.lane_share, late=given.late)
    spec = replace(read_model_spec(model_folder(None)), eos_token_ids=())
    settings = Settings(
        device="none",
        dtype="float32",
        load_format="dummy",
        attention_backend="none",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        cache=CacheConfig(num_blocks=(20_000,)),
        threads=1,
        seed=0,
        scheduler=scheduler,
    )
    slos = [f"{kind.name}:{kind.scaled(1, given.scale).slo}" for kind in MIX]
    return Served(
        spec=spec,
        settings=settings,
        description=Description(device="cpu"),
        classes=service_classes(slos),
        max_queue=10**9 if given.open_door else None,
        max_queue_wait_s=inf if given.open_door else None,
    )


def run(rate: float, policy: str, budget: int, given: argparse.Namespace) -> list[Exchange]:
    """All requests to their ends."""
    replica = Replica(served(policy, budget, given), Steps())
    world = World([replica], Front(), IdWriter(given.seed), Clients(), seed=7)
    times = poisson_times(rate, given.requests, given.seed)
    return world.run(conversations(MIX, times, given.seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 0.4, 0.5, 0.6, 0.8, 1.2])
    parser.add_argument("--policies", nargs="*", default=["fcfs", "fair", "slo"])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--lane-share", type=float, default=0.25)
    parser.add_argument("--late", default="serve")
    parser.add_argument("--budgets", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--open-door", action="store_true", help="admission lets everybody in")
    given = parser.parse_args()
    slos = {kind.name: kind.scaled(1, given.scale).slo for kind in MIX}
    print(f"{'rate':>5} {'policy':<10} {'in SLO':>7} {'refused':>7} {'goodput/s':>9}  by kind")
    for rate in given.rates:
        for policy in given.policies:
            for budget in given.budgets if policy != "slo" else [512]:
                found = run(rate, policy, budget, given)
                good = [x for x in found if not misses(slos[x.service_class], x, latency(x))]
                total = Counter(x.service_class for x in found)
                kept = Counter(x.service_class for x in good)
                name = policy if policy == "slo" else f"{policy} {budget}"
                print(
                    f"{rate:5.2f} {name:<10} {len(good) / len(found):7.1%} "
                    f"{sum(bool(x.error) for x in found) / len(found):7.1%} "
                    f"{len(good) / found[-1].scheduled_s:9.3f}  "
                    + "  ".join(f"{kind} {kept[kind] / total[kind]:.0%}" for kind in total),
                    flush=True,
                )


if __name__ == "__main__":
    main()
