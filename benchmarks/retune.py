"""`--retune` on a real server whose traffic changes, and steady, with and without it.

    python benchmarks/retune.py headway-tiny --minutes 10 [--json FILE]
    python benchmarks/retune.py headway-tiny --minutes 2.5 --steady 1     (half an hour in all)

Runs of `minutes` for each of three phases, first the changing mix with `--retune` and without, then
`--steady` runs of as long of the first phase, in turns. The same requests come to both. Told are,
by phase, the share in their objectives and the goodput (of a phase that follows another, what came
in its second half), what was changed and what became of it, and the CPU seconds of the process
that simulates as a share of a core. A phase is RATE:CLASS:PROMPT:ANSWER, several with commas.

Before that each phase's rate is moved, in runs of `--fit` seconds, to where the server as it starts
keeps 50 to 90% in their objectives, so that there is something to gain and something to lose on a
machine of any speed: four minutes with 12. `--fit 0` takes the rates as they are.
"""

import argparse
import time
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from common import get_json, markdown, serving, write_json
from headway.bench.latency import latency
from headway.bench.prompts import Made
from headway.bench.report import misses
from headway.bench.workload import Conversation, Turn
from headway.core.service import service_classes
from headway.measure.record import Exchange
from served import Stream, drive

PHASES = ("80:talk:40:40", "25:draft:60:160", "45:talk:40:40,6:draft:60:120")
SLOS = ("talk:ttft=300ms,tpot=6ms", "draft:ttft=2s,tpot=30ms")
DRAIN_S = 20.0
FITS, MOST_FITS = (0.5, 0.9), 6
"""The share in SLO that a phase is fitted to, and after so many runs it is as near as it comes."""


def traffic(phases: list[str], seconds: float, seed: int) -> list[Conversation]:
    """Poisson arrivals of each kind, lognormal lengths, each phase so long."""
    rng, found = np.random.default_rng(seed), []
    for number, phase in enumerate(phases):
        for kind in phase.split(","):
            rate, name, prompt, answer = kind.split(":")
            at_s = number * seconds
            while (at_s := at_s + float(rng.exponential(1 / float(rate)))) < seconds * (number + 1):
                lengths = [
                    max(int(int(middle) * rng.lognormal(0, 0.4)), 4) for middle in (prompt, answer)
                ]
                turn = Turn(prompt=(Made(f"{at_s:.6f}", lengths[0]),), output_tokens=lengths[1])
                found.append(Conversation(at_s=at_s, turns=(turn,), service_class=name))
    return sorted(found, key=lambda talk: talk.at_s)


def fitted(given: argparse.Namespace, phases: list[str]) -> list[str]:
    """The phases at rates at which the server as it starts keeps `FITS` of them."""
    objectives, found = [f"--slo={slo}" for slo in given.slo], []
    with serving(given.folder, *given.flags.split(), *objectives) as (url, _):
        for phase in phases:
            low, high, factor = 0.0, inf, 1.0
            for number in range(MOST_FITS):
                stream = Stream(conversations=traffic([scaled(phase, factor)], given.fit, number))
                exchanges = drive(url, [stream], seed=number, drain_s=DRAIN_S).exchanges[0]
                share = judged(given, exchanges, given.fit / 4, given.fit)["in_slo"]
                print(f"{scaled(phase, factor)}: {share:.1%} in SLO", flush=True)
                if FITS[0] <= share <= FITS[1]:
                    break
                low, high = (factor, high) if share > FITS[1] else (low, factor)
                factor = 2 * low if high == inf else (low * high) ** 0.5 if low else high / 2
            found.append(scaled(phase, factor))
    return found


def scaled(phase: str, factor: float) -> str:
    """The same requests, so many times as often."""
    kinds = [kind.partition(":") for kind in phase.split(",")]
    return ",".join(f"{float(rate) * factor:.4g}:{rest}" for rate, _, rest in kinds)


def run(given: argparse.Namespace, phases: list[str], seed: int, *flags: str) -> dict[str, Any]:
    """One server under all phases: figures by phase, and what it tells of its retuning."""
    seconds = 60 * given.minutes
    objectives = [f"--slo={slo}" for slo in given.slo]
    with serving(given.folder, *given.flags.split(), *objectives, *flags) as (url, _):
        stream = Stream(conversations=traffic(phases, seconds, seed))
        driven = drive(url, [stream], seed=seed, drain_s=DRAIN_S)
        told = get_json(f"{url}/stats")["retuning"]
    ends = [seconds * number for number in range(len(phases) + 1)]
    rows = [
        judged(given, driven.exchanges[0], begin + (end - begin) / 2 * bool(number), end)
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
    return {"phases": rows, "retuning": told, "client": driven.client}


def judged(given: argparse.Namespace, found: list[Exchange], begin: float, end: float):
    """Of the requests that were due then: how many, the share in SLO, those a second."""
    classes = service_classes(list(given.slo))
    due = [x for x in found if begin <= x.scheduled_s < end]
    met = 0
    for x in due:
        times = latency(x)
        slo = classes[x.service_class].objectives(x.asked_prompt_tokens)
        met += times is not None and not misses(slo, x, times)
    return {"requests": len(due), "in_slo": met / max(len(due), 1), "goodput": met / (end - begin)}


def shown(name: str, with_it: dict[str, Any], without: dict[str, Any]) -> list[list[str]]:
    """A row for each phase."""
    return [
        [
            f"{name}, phase {number + 1}",
            f"{a['requests']:,}",
            f"{a['in_slo']:.1%}",
            f"{b['in_slo']:.1%}",
            f"{a['goodput']:.1f}",
            f"{b['goodput']:.1f}",
        ]
        for number, (a, b) in enumerate(zip(with_it["phases"], without["phases"], strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--minutes", type=float, default=10, help="of each phase")
    parser.add_argument("--steady", type=int, default=2, help="runs of steady traffic")
    parser.add_argument("--changes", type=int, default=1, help="runs of changing traffic")
    parser.add_argument("--phase", action="append", default=[])
    parser.add_argument("--slo", action="append", default=[])
    parser.add_argument("--fit", type=float, default=12.0, help="seconds of each run that fits")
    parser.add_argument("--flags", default="--threads 1 --no-log-requests")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    phases, given.slo = given.phase or list(PHASES), given.slo or list(SLOS)
    began_s, told, rows = time.monotonic(), [], []
    phases = fitted(given, phases) if given.fit else phases
    changing = [(f"changes {n + 1}", phases) for n in range(given.changes)]
    steady = [(f"steady {n + 1}", phases[:1] * len(phases)) for n in range(given.steady)]
    for number, (name, kinds) in enumerate(changing + steady):
        pair = {}
        for flags in (("--retune",), ())[:: 1 if number % 2 == 0 else -1]:
            pair[bool(flags)] = run(given, kinds, given.seed + number, *flags)
        rows += shown(name, pair[True], pair[False])
        told.append({"name": name, "with": pair[True], "without": pair[False]})
    names = ["", "requests", "in SLO, --retune", "without", "goodput/s, --retune", "without"]
    print(markdown(names, rows))
    for each in told:
        retuning = each["with"]["retuning"]
        share = retuning["cpu_s"] / (60 * given.minutes * len(phases))
        print(f"{each['name']}: {share:.2%} of a core, {retuning['num_simulated']} simulations")
        for change in retuning["changes"]:
            print(
                f"  {change['changes']} for {change['was']}: {change['outcome']}, {change['why']}"
            )
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")
    if given.json:
        write_json(given.json, told)


if __name__ == "__main__":
    main()
