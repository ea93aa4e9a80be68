"""What a simulated token costs: `python benchmarks/simulator_speed.py [FOLDER] [--profile]`.

A closed loop of as many clients as the server has rows, prompts of 150 tokens and answers of 80 in
the mean, on a truth by formula: all that is left is the engine, the door and the events. CPU
seconds of this process over the tokens that were answered; the whole of a request's cost, its
prompt's too, is in them. `--profile` prints what leads it.
"""

import argparse
import cProfile
import pstats
import time

from common import markdown
from headway.advise.simulate.run import Plan, once, plan
from headway.config.options import BenchOptions, EngineOptions, SimulateOptions
from headway.config.options.field import Bytes
from headway.spec.embedded import model_folder


def wanted(folder: str, rows: int, requests: int, policy: str) -> Plan:
    """A server with so many rows, and as many clients, each with an objective it can meet."""
    engine = EngineOptions(max_num_seqs=rows, policy=policy, kv_memory=Bytes(2**31))
    load = BenchOptions(
        concurrency=rows,
        num_requests=requests,
        input_len="lognormal:150,0.5",
        output_len="lognormal:80,0.4",
        slo=["ttft=10s,tpot=1s"],
        seed=3,
    )
    served = SimulateOptions(served_slo=["ttft=10s,tpot=1s"])
    return plan(model_folder(folder), served, load, engine)


def measure(given: argparse.Namespace, rows: int, policy: str) -> list[str]:
    """A row of the table."""
    requests = max(min(20 * rows, 2000), 100)
    asked = wanted(given.folder, rows, requests, policy)
    best, tokens, steps, virtual_s = float("inf"), 0, 0, 0.0
    for _ in range(given.repeat):
        began_s = time.process_time()
        report, world = once(asked, 0, 0.5, "benchmark")
        best = min(best, time.process_time() - began_s)
        tokens = sum(replica.num_tokens for replica in world.replicas)
        steps = sum(replica.num_steps for replica in world.replicas)
        virtual_s = max(x.ended_s or 0.0 for x in world.exchanges)
        assert not report.counts.failed, report.counts
    return [
        policy,
        f"{rows}",
        f"{tokens:,}",
        f"{best / tokens * 1e6:.1f}",
        f"{best / steps * 1e6:.0f}",
        f"{best / requests * 1e6:,.0f}",
        f"{virtual_s / best:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--policy", default="slo,fcfs")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    names = ["policy", "rows", "tokens", "µs a token", "µs a step", "µs a request", "x real time"]
    cells = [(p, int(r)) for p in given.policy.split(",") for r in given.rows.split(",")]
    print(markdown(names, [measure(given, rows, policy) for policy, rows in cells]))
    if given.profile:
        asked = wanted(given.folder, 32, 640, "slo")
        profile = cProfile.Profile()
        profile.runcall(once, asked, 0, 0.5, "benchmark")
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
