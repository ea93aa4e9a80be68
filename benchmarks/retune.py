"""`--retune` on a real server whose traffic changes, and steady, with and without it.

    python benchmarks/retune.py headway-tiny --minutes 10 [--json FILE]
    python benchmarks/retune.py headway-tiny --minutes 2.5 --steady 1     (half an hour in all)

Runs of `minutes` for each of three phases, first the changing mix with `--retune` and without, then
`--steady` runs of as long of the first phase, in turns. The same requests come to both. Told are,
by phase, the share in their objectives and the goodput (of a phase that follows another, what came
in its second half), what was changed and what became of it, and the CPU seconds of the process
that simulates as a share of a core, in each phase; and of each question that was asked, what was
seen of its requests beside what the simulation of the present settings said of the same.

A phase is RATE:CLASS:PROMPT:ANSWER, several with commas. Talks are read as they come: their
objective for a token is half of what it takes where all rows are full, so that fewer rows keep it;
drafts are not, and want all rows. Where a phase is on a knife's edge two runs of the same settings
differ by 17 points; so each phase's rate is `--load` times the one at which the server as it starts
keeps 80 to 97%, found in runs of `--fit` seconds on a machine of any speed: six minutes with 12.
`--fit 0` takes rates and objectives as they are.
"""

import argparse
import time
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from threading import Timer
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
TALK, DRAFT, TTFT_TOKENS, FLOOD = 0.5, 1.5, 60, 4.0
"""Objectives for a token of what it takes where all rows are full, for a first token of these; and
how many times its rate fills all rows."""
DRAIN_S = 20.0
FITS, MOST_FITS = (0.8, 0.97), 7
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


def objectives(given: argparse.Namespace, phase: str) -> list[str]:
    """Those of talks and drafts, by what a token takes where such requests fill all rows."""
    with serving(given.folder, *given.flags.split(), "--max-queue-wait=10s") as (url, _):
        stream = Stream(conversations=traffic([scaled(phase, FLOOD)], given.fit, 0))
        exchanges = drive(url, [stream], seed=0, drain_s=DRAIN_S).exchanges[0]
    times = [latency(x) for x in exchanges if x.scheduled_s > given.fit / 4]
    token_s = median([each.tpot_s for each in times if each and each.tpot_s])
    found = [
        f"{name}:ttft={TTFT_TOKENS * share * token_s:.4f}s,tpot={share * token_s:.5f}s"
        for name, share in (("talk", TALK), ("draft", DRAFT))
    ]
    print(f"{1e3 * token_s:.1f} ms a token where all rows are full: {found}", flush=True)
    return found


def fitted(given: argparse.Namespace, phases: list[str]) -> list[str]:
    """The phases at `--load` times the rates at which the server as it starts keeps `FITS`."""
    own, found = [f"--slo={slo}" for slo in given.slo], []
    with serving(given.folder, *given.flags.split(), *own) as (url, _):
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
            found.append(scaled(phase, given.load * factor))
    print(f"phases: {found}", flush=True)
    return found


def scaled(phase: str, factor: float) -> str:
    """The same requests, so many times as often."""
    kinds = [kind.partition(":") for kind in phase.split(",")]
    return ",".join(f"{float(rate) * factor:.4g}:{rest}" for rate, _, rest in kinds)


def run(given: argparse.Namespace, phases: list[str], seed: int, *flags: str) -> dict[str, Any]:
    """One server under all phases: figures by phase, and what it told of its retuning in each."""
    seconds, told = 60 * given.minutes, []
    own = [f"--slo={slo}" for slo in given.slo]
    with serving(given.folder, *given.flags.split(), *own, *flags) as (url, _):
        stream = Stream(conversations=traffic(phases, seconds, seed))
        began_s = get_json(f"{url}/stats")["now_s"]
        looks = [
            Timer(seconds * (number + 1), lambda: told.append(get_json(f"{url}/stats")["retuning"]))
            for number in range(len(phases))
        ]
        for look in looks:
            look.start()
        driven = drive(url, [stream], seed=seed, drain_s=DRAIN_S)
        for look in looks:
            look.join()
        told.append(get_json(f"{url}/stats")["retuning"])
    ends = [seconds * number for number in range(len(phases) + 1)]
    rows = [
        judged(given, driven.exchanges[0], begin + (end - begin) / 2 * bool(number), end)
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
    return {"phases": rows, "retuning": told, "began_s": began_s, "client": driven.client}


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


def tell(name: str, ran: dict[str, Any], seconds: float) -> None:
    """What the process took by phase, what it was asked, and what became of the changes."""
    told, began_s = ran["retuning"], ran["began_s"]
    spent = [0.0, *(each["cpu_s"] for each in told)]
    shares = ", ".join(f"{(b - a) / seconds:.2%}" for a, b in pairwise(spent[:-1]))
    print(f"\n{name}: {shares} of a core by phase, {told[-1]['num_simulated']} simulations")
    print(f"  at the end: {told[-1]['state']}")
    asked = {each["at_s"]: each for look in told for each in look["asked"]}
    for at_s, each in sorted(asked.items()):
        seen = "" if each["seen"] is None else f"{each['seen']:.1%} seen, "
        print(
            f"  {at_s - began_s:5.0f} s: {seen}{each['simulated']:.1%} simulated of "
            f"{each['num_requests']:,} in {each['seconds']} s, {each['cpu_s']:.1f} s: {each['why']}"
        )
    for change in {each["at_s"]: each for look in told for each in look["changes"]}.values():
        print(
            f"  {change['at_s'] - began_s:5.0f} s: {change['changes']} for {change['was']}: "
            f"{change['outcome']}, {change['why']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--minutes", type=float, default=10, help="of each phase")
    parser.add_argument("--steady", type=int, default=2, help="runs of steady traffic")
    parser.add_argument("--changes", type=int, default=1, help="runs of changing traffic")
    parser.add_argument("--phase", action="append", default=[])
    parser.add_argument("--slo", action="append", default=[])
    parser.add_argument("--fit", type=float, default=12.0, help="seconds of each run that fits")
    parser.add_argument("--load", type=float, default=1.3, help="times the rates that are fitted")
    parser.add_argument("--flags", default="--threads 1 --max-num-seqs 64 --no-log-requests")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    phases = given.phase or list(PHASES)
    began_s, told, rows = time.monotonic(), [], []
    given.slo = given.slo or (objectives(given, phases[0]) if given.fit else list(SLOS))
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
        tell(each["name"], each["with"], 60 * given.minutes)
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")
    if given.json:
        write_json(given.json, told)


if __name__ == "__main__":
    main()
