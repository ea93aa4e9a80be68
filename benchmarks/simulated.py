"""A simulation beside the real server, and beside the same real run once more.

    python benchmarks/simulated.py headway-tiny --json simulated.json
    python benchmarks/simulated.py FOLDER --flags "--quantization int8" --calibrate-rate 3 \\
        --slo ttft=1.5s,tpot=120ms --mix "chat=--input-len 150 --output-len uniform:60-100"

The server is calibrated on a load of its own, a ramp of other lengths than any mix has. The rate at
which a mix keeps 90% in SLO is searched in simulation; then each mix is sent at shares of that,
twice, with the same requests at the same times: what the two differ by no simulation can know.
The table has each figure of the simulation beside the mean of the real ones, and beside it how far
the second real run was from the first.
"""

import argparse
import asyncio
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import markdown, serving, write_json
from headway.advise.simulate.outcome import FIGURES
from headway.advise.simulate.run import prepare_simulation, simulate
from headway.advise.simulate.run import run_once as simulate_once
from headway.bench.prompts import GeneratedPiece, IdPiece, Prompt
from headway.bench.report import BenchReport, build_report
from headway.bench.run import measure, prepare, sped_up
from headway.bench.trial import run_once
from headway.bench.workload import Conversation
from headway.config.options import BenchOptions, EngineOptions, SimulateOptions, read_options
from headway.spec.embedded import model_folder

SHOWN = ("tpot_p50_s", "ttft_p50_s", "ttft_p99_s", "attainment", "refused_share")
MIXES = (
    "plain=--input-len lognormal:150,0.5 --output-len lognormal:80,0.4",
    "shared=--workload shared-prefix --prefix-len 300 --num-prefixes 3 --input-len uniform:20-120 "
    "--output-len uniform:30-90",
)
SEARCH_STEPS = 7


def load_options(text: str) -> BenchOptions:
    """Flags of `headway bench`."""
    tables, _, _ = read_options([BenchOptions], shlex.split(text), {})
    options: BenchOptions = tables[BenchOptions]
    return options


def real(url: str, load: BenchOptions, run: str = "") -> BenchReport:
    """One run of the load generator. Prompts of another `run` are others of the same lengths that
    share as much, or the second would find in the cache what the first has computed."""
    if load.calibrate:
        return asyncio.run(run_once(url, load, "benchmark", None))
    bench = prepare(url, load)
    talks = [renamed(talk, run) for talk in bench.traffic.conversations]
    bench = replace(bench, traffic=replace(bench.traffic, conversations=talks))
    found, _ = asyncio.run(measure(bench))
    return build_report(found, "benchmark")


def renamed(talk: Conversation, run: str) -> Conversation:
    """The same conversation in other words."""
    turns = [
        replace(turn, system=other(turn.system, run), prompt=other(turn.prompt, run))
        for turn in talk.turns
    ]
    return replace(talk, turns=tuple(turns))


def other(prompt: Prompt, run: str) -> Prompt:
    """Other ids: of made pieces by their key, of a trace's own by a shift that keeps what is alike
    alike."""
    shift = sum(run.encode())
    return tuple(
        replace(piece, key=f"{piece.key} {run}")
        if isinstance(piece, GeneratedPiece)
        else replace(piece, ids=tuple(32 + (i + shift) % 460 for i in piece.ids))
        if isinstance(piece, IdPiece)
        else piece
        for piece in prompt
    )


def capacity(given: argparse.Namespace, base: BenchOptions, engine: EngineOptions) -> float:
    """By how much `base` may be faster with 90% in SLO, as simulated."""
    low, high = 0.0, float("inf")
    faster = 1.0
    for _ in range(SEARCH_STEPS):
        wanted = prepare_simulation(
            model_folder(given.folder), simulation(given), sped_up(base, faster), engine
        )
        report, _ = simulate_once(wanted, 0, 1.0, "benchmark")
        if (report.rates.attainment or 0.0) >= 0.9:
            low = faster
        else:
            high = faster
        faster = 2 * low if high == float("inf") else (low * high) ** 0.5 if low else high / 2
    return low


def simulation(given: argparse.Namespace) -> SimulateOptions:
    """What the simulated server was started with: the real one's flags."""
    slos = [given.slo] if given.told else []
    return SimulateOptions(calibration=given.calibration, served_slo=slos)


def figures(report: BenchReport) -> dict[str, float | None]:
    return {name: FIGURES[name](report) for name in FIGURES}


def cases(given: argparse.Namespace, engine: EngineOptions) -> list[dict[str, Any]]:
    """Real, real again and simulated, for each mix and share."""
    found: list[dict[str, Any]] = []
    told = ["--slo", given.slo] if given.told else []
    with serving(given.folder, *shlex.split(given.flags), *told) as (url, _):
        if not Path(given.calibration).exists():
            real(url, load_options(calibrating(given)))
        for text in given.mix:
            name, _, flags = text.partition("=")
            base = load_options(mixed(given, flags))
            most = given.faster or capacity(given, base, engine)
            for share in given.shares:
                load = sped_up(base, most * share)
                runs = [f"{name} {share} {number}" for number in range(given.repeat)]
                pair = [real(url, load, run) for run in runs]
                case = {"mix": name, "flags": flags, "share": share, "faster": most * share}
                case["real"] = [figures(report) for report in pair]
                case["requests"] = pair[0].counts.counted
                case["client_late"] = [report.client.bottleneck for report in pair]
                found.append(case)
                write_json(given.json, found)
    return found


def mixed(given: argparse.Namespace, flags: str) -> str:
    """The flags of one mix at its base rate."""
    return (
        f"--rate {given.calibrate_rate} --slo {given.slo} --duration {given.seconds} "
        f"--seed {given.seed} {flags}"
    )


def simulated(
    given: argparse.Namespace, found: list[dict[str, Any]], engine: EngineOptions
) -> list[dict[str, Any]]:
    """Each case with what the simulation says of it."""
    folder = model_folder(given.folder)
    for case in found:
        load = sped_up(load_options(mixed(given, case["flags"])), case["faster"])
        wanted = prepare_simulation(folder, simulation(given), load, engine)
        report = simulate(wanted, "benchmark")
        case["simulated"] = figures(report)
        case["intervals"] = {n: [i.low, i.high] for n, i in report.simulation.intervals.items()}
        case["drift"] = report.simulation.drift
        traffic = wanted.bench.traffic
        case["rate"] = len(traffic.conversations) / traffic.span_s
    return found


def calibrating(given: argparse.Namespace) -> str:
    """The load that is calibrated on: from a tenth of the rate to more than it takes."""
    return (
        f"{given.calibrate} --arrivals ramp --ramp-from {given.calibrate_rate / 10} "
        f"--rate {given.calibrate_rate * 1.6} --duration {given.calibrate_seconds} --seed 991 "
        f"--calibrate {given.calibration}"
    )


def off(simulated: float | None, pair: list[float]) -> str:
    """By how much the simulation is off the mean of the real runs; shares in points."""
    mean = sum(pair) / len(pair)
    return "" if simulated is None or not mean else f"{simulated / mean - 1:+.0%}"


def row(case: dict[str, Any], name: str) -> list[str]:
    pair = [each[name] for each in case["real"] if each[name] is not None]
    simulated = case["simulated"][name]
    if not pair or simulated is None:
        return []
    head = [case["mix"], f"{case['share']:.0%}", f"{case['rate']:.3g}", name.removesuffix("_s")]
    low, high = case["intervals"][name]
    if name in ("attainment", "refused_share"):
        mean = sum(pair) / len(pair)
        shown = [f"{100 * value:.1f}%" for value in (*pair, simulated)]
        between, error = 100 * (pair[-1] - pair[0]), 100 * (simulated - mean)
        interval = f"{100 * low:.0f} to {100 * high:.0f}%"
        return [*head, *shown, interval, f"{between:+.1f} points", f"{error:+.1f} points"]
    shown = [f"{1e3 * value:.2f} ms" for value in (*pair, simulated)]
    between_runs = pair[-1] / pair[0] - 1
    interval = f"{1e3 * low:.2f} to {1e3 * high:.2f}"
    return [*head, *shown, interval, f"{between_runs:+.0%}", off(simulated, pair)]


def show(found: list[dict[str, Any]]) -> None:
    columns = [
        *("mix", "of capacity", "requests/s", "", "real", "again", "simulated", "interval"),
        *("again / real", "simulated / real"),
    ]
    rows = [shown for case in found for name in SHOWN if (shown := row(case, name))]
    print(markdown(columns, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--flags", default="", help="of the server and the simulated one")
    parser.add_argument("--slo", default="ttft=200ms,tpot=20ms")
    parser.add_argument("--told", action="store_true", help="the server knows these objectives")
    parser.add_argument("--mix", action="append", default=[], help="NAME=flags of headway bench")
    parser.add_argument("--shares", type=numbers, default=[0.5, 0.7, 0.9])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--calibrate", default="--input-len uniform:20-500 --output-len uniform:10-120"
    )
    parser.add_argument("--calibrate-rate", type=float, default=30.0)
    parser.add_argument("--calibrate-seconds", type=float, default=30.0)
    parser.add_argument("--calibration", default="calibration.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="simulate beside these real runs")
    parser.add_argument("--real-only", action="store_true", help="--from simulates later")
    parser.add_argument("--faster", type=float, help="the capacity, as a multiple of the rate")
    given = parser.parse_args()
    given.mix = given.mix or list(MIXES)
    tables, _, _ = read_options([EngineOptions], shlex.split(given.flags), {})
    engine = tables[EngineOptions]
    found = json.loads(given.source.read_text()) if given.source else cases(given, engine)
    if not given.real_only:
        found = simulated(given, found, engine)
        write_json(given.json or given.source, found)
        show(found)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
