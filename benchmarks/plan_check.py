"""What the planner says one server and two keep, beside `headway bench --find-goodput` of them.

    python benchmarks/plan_check.py headway-tiny --replicas 1,2 --json plan_check.json

A server of one thread is calibrated on a ramp of other lengths; then the highest rate that keeps
the attainment is searched by the very same search (`bench.search`), on the real server and on the
simulated one, to 3%: where both stop within 10%, as `--find-goodput` does, they may be 20% apart
though nothing is wrong. Replicas are engines of one server, each of one thread: on a machine with
fewer cores than replicas, server and load generator want they share them, in the simulation too.
Each number of engines has a calibration of as many, on a ramp that leaves each alone at first and
has all of them busy at its end: so it tells what they take from each other besides, by caches and
memory, which is printed below the table. (By a calibration of two engines one was foretold to keep
19% less than it kept.) Without the prefix cache: each rate of the search sends the same prompts,
which the real server would have computed at the rate before. The calibrations are kept beside the
file of `--json`, and used again where they lie there; without one they are forgotten.
"""

import argparse
import asyncio
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import markdown, serving, write_json
from headway.advise.simulate.machine import machinery
from headway.advise.simulate.run import once, plan
from headway.bench.report import GoodputPoint
from headway.bench.run import hastened
from headway.bench.search import bounds, search_rate
from headway.bench.trial import find_goodput, point
from headway.bench.trial import once as bench_once
from headway.config.options import BenchOptions, EngineOptions, SimulateOptions, read_options
from headway.spec.embedded import model_folder

QUIET = "--no-log-requests"


def options(table: type, text: str) -> Any:
    """An options table from flags."""
    return read_options([table], shlex.split(text), {})[0][table]


def calibration_of(given: argparse.Namespace, replicas: int) -> str:
    """The file that tells of as many engines; one that was given tells of all."""
    return given.calibration or str(given.kept.with_suffix(f".calibration{replicas}.json"))


def calibrate(given: argparse.Namespace, replicas: int) -> None:
    """So many engines under a ramp from a tenth of the rate to twice as much, and a quarter more
    for each beyond the first."""
    load = options(
        BenchOptions,
        f"--input-len uniform:20-500 --output-len uniform:10-120 --arrivals ramp "
        f"--ramp-from {given.rate / 10} --rate {given.rate * (7 + replicas) / 4} --seed 991 "
        f"--duration {given.calibrate_seconds} --calibrate {calibration_of(given, replicas)}",
    )
    flags = [QUIET, *shlex.split(given.flags), f"--replicas={replicas}"]
    with serving(given.folder, *flags) as (url, _):
        asyncio.run(bench_once(url, load, "benchmark", None))


def replicas_of(given: argparse.Namespace) -> list[int]:
    """Of how many engines each server is."""
    return [int(part) for part in given.replicas.split(",")]


def real(given: argparse.Namespace, load: BenchOptions, replicas: int) -> list[GoodputPoint]:
    """Every rate that was tried on the real server."""
    flags = [QUIET, *shlex.split(given.flags), f"--replicas={replicas}", f"--slo={given.slo}"]
    with serving(given.folder, *flags) as (url, _):
        report = asyncio.run(find_goodput(url, load, "benchmark", None, given.precision))
    assert report.goodput_search is not None
    return list(report.goodput_search.points)


def simulated(
    given: argparse.Namespace, load: BenchOptions, replicas: int, case: int
) -> list[GoodputPoint]:
    """The same search in simulation, in one of the machine's drawn cases."""
    path = calibration_of(given, replicas)
    told = SimulateOptions(calibration=path, replicas=replicas, served_slo=[given.slo], runs=1)
    engine: EngineOptions = options(EngineOptions, given.flags)

    async def at_rate(rate: float) -> GoodputPoint:
        wanted = plan(model_folder(given.folder), told, hastened(load, rate / load.rate), engine)
        seed, scale = wanted.machinery.cases(1, 0)[case]
        return point(rate, once(wanted, seed, scale, "benchmark")[0], load.attainment)

    return asyncio.run(search_rate(at_rate, load.rate, load.max_rate, given.precision))


def best(points: list[GoodputPoint]) -> float:
    return bounds(points)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--flags", default="--threads 1 --no-prefix-cache")
    parser.add_argument("--slo", default="ttft=200ms,tpot=20ms")
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--precision", type=float, default=1.03)
    parser.add_argument("--calibrate-seconds", type=float, default=30.0)
    parser.add_argument("--calibration", help="one for all, there or to be made")
    parser.add_argument(
        "--load", default="--input-len lognormal:150,0.5 --output-len lognormal:80,0.4"
    )
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--real-only", action="store_true", help="simulate later, with --from")
    parser.add_argument("--from", dest="source", type=Path, help="real rates of an earlier run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        given.kept = given.json or Path(scratch) / "plan_check.json"
        compare(given)


def compare(given: argparse.Namespace) -> None:
    """Real rates, then simulated ones, and their table."""
    base = f"--rate {given.rate} --duration {given.seconds} --slo {given.slo} --seed 5 "
    load = replace(options(BenchOptions, base + given.load), find_goodput=False)
    found: list[dict[str, Any]] = []
    for replicas in replicas_of(given):
        if not Path(calibration_of(given, replicas)).exists():
            calibrate(given, replicas)
        found.append({"replicas": replicas, "real": measured(given, load, replicas)})
        write_json(given.json, found)
    if given.real_only:
        return
    rows = []
    for each in found:
        cases = [best(simulated(given, load, each["replicas"], case)) for case in range(3)]
        each["simulated"] = cases
        off = cases[0] / each["real"] - 1 if each["real"] else float("nan")
        interval = f"{min(cases):.1f} to {max(cases):.1f}"
        rows.append(
            [
                f"{each['replicas']}",
                f"{each['real']:.1f}",
                f"{cases[0]:.1f}",
                interval,
                f"{off:+.0%}",
            ]
        )
    write_json(given.json, found)
    print(markdown(["servers", "real, requests/s", "simulated", "interval", "off"], rows))
    told = SimulateOptions(calibration=calibration_of(given, max(replicas_of(given))))
    front = machinery(model_folder(given.folder), told, options(EngineOptions, given.flags)).front
    print(f"\nAn engine in a step makes the others' steps {front.beside:.0%} longer, cores aside.")


def measured(given: argparse.Namespace, load: BenchOptions, replicas: int) -> float:
    """The rate that the real server kept, or kept in the run of `--from`."""
    if given.source:
        import json

        rows = json.loads(given.source.read_text())
        return float(next(row["real"] for row in rows if row["replicas"] == replicas))
    return best(real(given, replace(load, find_goodput=True), replicas))


if __name__ == "__main__":
    main()
