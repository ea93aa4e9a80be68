"""A simulation beside the real engine on a clock of CPU time, which neighbours hardly touch.

    python benchmarks/simulated_in_process.py headway-tiny --json in_process.json
    python benchmarks/simulated_in_process.py FOLDER --flags "--quantization int8" --seconds 120

The model computes in this process, in one thread, and the clock moves by the CPU seconds of its
steps; who arrives, is let in and waits is the simulator's own. Without HTTP it says nothing of the
host, but what it says of steps and queues does not depend on who else uses the machine. Calibrated
on a ramp of lengths that no mix has; each mix runs at shares of its simulated capacity, twice, and
is simulated. The table is that of `simulated.py`.
"""

import argparse
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import write_json
from headway.advise.simulate.front import NO_FRONT
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import MIN_DRIFT
from headway.advise.simulate.outcome import intervals, report_of
from headway.advise.simulate.replica import ServerSetup, SimulatedReplica
from headway.advise.simulate.run import SIMULATED_URL
from headway.advise.simulate.truth import CalibratedTruth, CalibrationFit
from headway.assemble import assemble
from headway.bench.prompts import IdWriter
from headway.bench.report import BenchReport
from headway.bench.run import Bench, prepare, sped_up
from headway.config.options import BenchOptions, EngineOptions, read_options
from headway.core.clock import VirtualClock
from headway.core.records import StepRecord
from headway.core.service import service_classes
from headway.engine.engine import Engine
from headway.spec.embedded import model_folder
from headway.telemetry.calibration import step_columns
from simulated import figures, load_options, numbers, renamed, show

MIXES = (
    "plain=--input-len lognormal:150,0.5 --output-len lognormal:80,0.4 --rate 20",
    "shared=--workload shared-prefix --prefix-len 300 --num-prefixes 3 --input-len uniform:20-120 "
    "--output-len uniform:30-90 --rate 20",
)


class CpuClock(VirtualClock):
    """A virtual clock that moves by CPU seconds while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s: float | None = None

    def now_s(self) -> float:
        spent_s = 0.0 if self._since_s is None else time.process_time() - self._since_s
        return super().now_s() + spent_s

    def running(self, engine: Engine, records: list[StepRecord]) -> None:
        """Let every step of `engine` move it, and keep the records."""
        step = engine.step

        def timed() -> Any:
            self._since_s = time.process_time()
            updates, record = step()
            spent_s, self._since_s = time.process_time() - self._since_s, None
            self.advance(spent_s)
            records.append(record)
            return updates, record

        engine.step = timed  # type: ignore[method-assign]


class Machine:
    """The real engine, and what simulations of it need."""

    def __init__(self, folder: Path, flags: str, slo: str) -> None:
        tables, _, _ = read_options([EngineOptions], shlex.split(flags), {})
        options = replace(tables[EngineOptions], threads=1)
        made = assemble(folder, options)
        self.name, self.executor = folder.name, made.engine.executor
        self.served = ServerSetup(
            spec=made.spec,
            settings=made.settings,
            description=self.executor.describe(),
            classes=service_classes([slo]),
        )
        self.fit: CalibrationFit | None = None
        self.belief = made.engine.cost

    def real(self, bench: Bench, run: str) -> tuple[BenchReport, list[StepRecord]]:
        """The model computes."""
        records: list[StepRecord] = []
        clock = CpuClock()
        belief = self.belief if self.fit is None else self.fit.belief
        served = replace(self.served, belief=belief)
        replica = SimulatedReplica(served, Nobody(), clock=clock, executor=self.executor)
        clock.running(replica.engine, records)
        talks = [renamed(talk, run) for talk in bench.traffic.conversations]
        world = World([replica], NO_FRONT, IdWriter(bench.options.seed), Clients(), seed=0)
        exchanges = world.run(talks)
        while replica.engine.has_work:  # the runtime is told of those that have left
            replica.engine.step()
        return report_of(bench, exchanges, self.name, "cpu clock", "benchmark"), records

    def simulated(self, bench: Bench, seed: int, scale: float) -> BenchReport:
        """Nobody computes."""
        assert self.fit is not None
        served = replace(self.served, belief=self.fit.belief)
        replica = SimulatedReplica(served, CalibratedTruth(self.fit, seed=seed, scale=scale))
        world = World([replica], NO_FRONT, IdWriter(bench.options.seed), Clients(), seed=0)
        exchanges = world.run(bench.traffic.conversations)
        return report_of(bench, exchanges, self.name, "calibrated", "benchmark")


class Nobody:
    """No truth: the real one computes."""

    label = "real"

    def seconds(self, work: Any) -> float:
        raise AssertionError("a real executor asks no truth")


def capacity(machine: Machine, base: BenchOptions) -> float:
    """By how much `base` may be faster with 90% in SLO, as simulated."""
    low, high, faster = 0.0, float("inf"), 1.0
    for _ in range(8):
        report = machine.simulated(prepare(SIMULATED_URL, sped_up(base, faster)), 0, 1.0)
        low, high = (faster, high) if (report.rates.attainment or 0) >= 0.9 else (low, faster)
        faster = 2 * low if high == float("inf") else (low * high) ** 0.5 if low else high / 2
    return low


def case_of(machine: Machine, base: BenchOptions, most: float, share: float) -> dict[str, Any]:
    """Real, real again, simulated with its interval."""
    bench = prepare(SIMULATED_URL, sped_up(base, most * share))
    pair = [machine.real(bench, f"{share} {number}")[0] for number in range(2)]
    assert machine.fit is not None
    more = max(machine.fit.drift, MIN_DRIFT)
    drawn = ((0, 1.0), (1, 1.0), (2, 1.0), (0, 1 + more), (0, 1 - more))
    reports = [machine.simulated(bench, seed, scale) for seed, scale in drawn]
    return {
        "share": share,
        "rate": len(bench.traffic.conversations) / bench.traffic.span_s,
        "requests": pair[0].counts.counted,
        "real": [figures(report) for report in pair],
        "simulated": figures(reports[0]),
        "intervals": {n: [i.low, i.high] for n, i in intervals(reports).items()},
        "drift": machine.fit.drift,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--flags", default="", help="of the engine")
    parser.add_argument("--slo", default="ttft=200ms,tpot=20ms")
    parser.add_argument("--mix", action="append", default=[], help="NAME=flags of headway bench")
    parser.add_argument("--shares", type=numbers, default=[0.5, 0.7, 0.9])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--calibrate",
        default="--input-len uniform:20-500 --output-len uniform:10-120 --rate 160 --ramp-from 5",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine = Machine(model_folder(given.folder), given.flags, given.slo)
    ramp = load_options(f"{given.calibrate} --arrivals ramp --duration {given.seconds} --seed 991")
    _, records = machine.real(prepare(SIMULATED_URL, ramp), "ramp")
    machine.fit = CalibrationFit(step_columns(records), machine.served.settings.cache.windows)
    found = []
    for text in given.mix or MIXES:
        name, _, flags = text.partition("=")
        base = load_options(f"--slo {given.slo} --duration {given.seconds} --seed 5 {flags}")
        most = capacity(machine, base)
        for share in given.shares:
            found.append({"mix": name, **case_of(machine, base, most, share)})
            write_json(given.json, found)
    show(found)


if __name__ == "__main__":
    main()
