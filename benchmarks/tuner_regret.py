"""The tuner's regret: what its choice is short of the best of a whole grid of settings.

    python benchmarks/tuner_regret.py headway-tiny --simulated         three minutes, no server
    python benchmarks/tuner_regret.py headway-tiny --file regret.json  50 minutes, in pieces

Three workloads, 16 settings of rows, tokens a step and policy. `headway tune`'s own search chooses
among them in simulation, its own confirmation runs the best three and the default on real servers,
seven runs in all. Then every setting runs on a real server, the same arrivals for all of a round,
which nobody was chosen by, the order turned from round to round. Each run is kept in `--file` as it
ends: the script goes on where it stopped, so that a grid fits several quiet hours. Rates are
`--load` times what the default keeps in simulation, and the objective for a token is what a step of
a quarter of the rows takes, so that settings differ on any machine.

Regret is 1 - goodput of the choice / goodput of the best, with the 95% of a paired bootstrap
between the two; the best of 16 is best by luck too, so it is an upper bound. `--simulated` does the
same on a machine by formula (20 ms a step, 3 ms a token, 10% by chance): the exhaustive grid is
simulated with arrivals and moments of the machine that the search did not have.
"""

import argparse
import asyncio
import shlex
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from common import markdown, serving
from headway.advise.simulate.run import Plan, once, plan
from headway.advise.tune.confirm import MOST_RUNS, Block, Confirmation, paired_gain, summed
from headway.advise.tune.outcome import choose
from headway.advise.tune.search import Search
from headway.advise.tune.space import Changes, Knob, ordered, said
from headway.assemble import plan_settings
from headway.bench.calibrate import open_calibration
from headway.bench.run import hastened
from headway.bench.trial import once as bench_once
from headway.core.embedded import model_folder
from headway.core.options import BenchOptions, EngineOptions, SimulateOptions, read_options
from headway.core.plan import Description
from headway.core.resolve import Settings
from headway.core.service import Alone
from headway.core.slo import parse_slo
from headway.engine.cost import Work
from headway.telemetry.calibration import Calibration, HostCost, StepColumns, fingerprint

WORKLOADS = {
    "chats": "--input-len lognormal:60,0.5 --output-len lognormal:80,0.4",
    "long prompts": "--input-len lognormal:250,0.7 --output-len lognormal:40,0.5",
    "shared beginnings": "--workload shared-prefix --prefix-len 300 --num-prefixes 3 "
    "--input-len uniform:20-120 --output-len uniform:30-90",
}
GRID = {"max_num_seqs": (8, 16, 32), "max_num_batched_tokens": (128,), "policy": ("fcfs",)}
"""Beside the default's 64 rows, its tokens a step and its policy: 4 x 2 x 2 settings."""
ROWS, HELD_OUT, CONFIRMED = 64, 1000, 100
"""Rows of the default; of the exhaustive grid the seed is so much higher; rounds from here on are
the tuner's own."""
TTFT_STEPS = 60
"""The objective of a first token: so many of a token's."""
SEARCH_STEPS, KEPT = 9, 0.9


class Landscape(msgspec.Struct, kw_only=True):
    """One workload: what it is, what was chosen and why, and every run so far."""

    name: str
    load: str
    chosen: Changes = ()
    why: str = ""
    finalists: list[Changes] = []
    """The default and the best of the search, for real runs."""
    blocks: list[Block] = []

    def block(self, changes: Changes, number: int) -> Block | None:
        """The run of a setting in a round, where it is over."""
        found = (b for b in self.blocks if b.changes == changes and b.round == number)
        return next(found, None)


def options(table: type, text: str):
    """An options table from flags."""
    return read_options([table], shlex.split(text), {})[0][table]


def knobs() -> list[Knob]:
    """The tuner's, with the values of the grid."""
    return [
        Knob(name=name, now=lambda s: None, values=lambda s, values=values: list(values))
        for name, values in GRID.items()
    ]


def grid(settings: Settings) -> list[Changes]:
    """Every setting, the default first."""
    choices = [[(), *((name, value) for value in values)] for name, values in GRID.items()]
    return [ordered([c for c in each if c], settings) for each in product(*choices)]


# ── the machine ─────────────────────────────────────────────────────────────────────────────


def measure(given: argparse.Namespace) -> None:
    """A server of the default under a ramp to more than it takes."""
    load = options(
        BenchOptions,
        "--input-len uniform:20-500 --output-len uniform:10-120 --arrivals ramp --ramp-from "
        f"{given.ramp / 10} --rate {given.ramp} --seed 991 --duration {given.calibrate_seconds} "
        f"--calibrate {given.calibration}",
    )
    with serving(given.folder, *shlex.split(given.flags)) as (url, _):
        asyncio.run(bench_once(url, load, "benchmark", None))


def by_formula(given: argparse.Namespace, path: Path) -> None:
    """The calibration of a machine that takes 20 ms a step and 3 ms a token."""
    spec, settings, _, _ = plan_settings(model_folder(given.folder), engine_of(given))
    rng, steps, now_s = np.random.default_rng(0), StepColumns(), 0.0
    for _ in range(2000):
        rows, chunk = int(rng.integers(1, ROWS + 1)), int(rng.choice([0, 0, 0, 100, 400]))
        read = rows * int(rng.integers(50, 400))
        seconds = (0.02 + 3e-3 * (rows + chunk / 8)) * float(rng.lognormal(0, 0.1))
        for column, value in zip(
            (steps.started_s, steps.seconds, steps.tokens, steps.sampled),
            (now_s, seconds, rows + chunk, rows),
        ):
            column.append(value)
        steps.attended.append(read)
        steps.read.append(read * len(settings.cache.windows))
        now_s += seconds
    found = Calibration(
        headway="1",
        model=model_folder(given.folder).name,
        fingerprint=fingerprint(spec),
        description=Description(device="cpu"),
        settings=settings.told(),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.cache.block_size,
        group_blocks=[count - 1 for count in settings.cache.num_blocks],
        vocab_size=spec.vocab_size,
        alone=Alone(),
        steps=steps,
        host=HostCost(in_s=0.0, out_s=0.0, door_s=0.0),
    )
    path.write_bytes(msgspec.json.encode(found))


def engine_of(given: argparse.Namespace) -> EngineOptions:
    return options(EngineOptions, " ".join(f for f in given.flags.split() if "log" not in f))


def planned(given: argparse.Namespace, load: BenchOptions) -> Plan:
    """The default under a load."""
    told = SimulateOptions(calibration=given.calibration, served_slo=load.slo)
    return plan(model_folder(given.folder), told, load, engine_of(given))


def objectives(given: argparse.Namespace) -> str:
    """TPOT: a step of a quarter of the default's rows; TTFT: many of these."""
    load = options(BenchOptions, "--rate 1 --num-requests 2 --slo ttft=1s")
    found = planned(given, load).machinery
    assert found.fit is not None
    rows = ROWS // 4
    tpot_s = found.fit.mean.seconds(Work(rows, rows, 150 * rows, 150 * rows))
    return f"ttft={TTFT_STEPS * tpot_s * 1e3:.3f}ms,tpot={tpot_s * 1e3:.3f}ms"


def load_of(given: argparse.Namespace, flags: str) -> str:
    """The flags of a workload at `--load` times the rate at which the default keeps nine of ten."""
    slo = objectives(given)
    base = options(
        BenchOptions, f"--rate 1 --duration 400s --seed {given.seed} --slo {slo} {flags}"
    )
    low, high, faster = 0.0, float("inf"), given.ramp / 8
    for _ in range(SEARCH_STEPS):
        wanted = planned(given, hastened(base, faster))
        report, _ = once(wanted, 0, 1.0, "benchmark")
        low, high = (faster, high) if report.rates.attainment >= KEPT else (low, faster)
        faster = 2 * low if high == float("inf") else (low * high) ** 0.5 if low else high / 2
    rate = given.load * max(low, 1e-3)
    return f"--rate {rate:.4g} --slo {slo} --seed {given.seed} {flags}"


# ── the tuner ───────────────────────────────────────────────────────────────────────────────


def search_of(given: argparse.Namespace, text: str, seed: int) -> Search:
    load = replace(options(BenchOptions, f"{text} --num-requests {given.conversations}"), seed=seed)
    wanted = planned(given, load)
    return Search(
        folder=model_folder(given.folder),
        engine=engine_of(given),
        calibration=open_calibration(given.calibration),
        plan=replace(wanted, seed=seed),
    )


def landscape(given: argparse.Namespace, name: str) -> Landscape:
    """A workload and what the search says of it."""
    text = load_of(given, WORKLOADS[name])
    points = search_of(given, text, given.seed).run(knobs(), 96, given.seed)
    chosen, why = choose(points, [], "goodput")
    best = [p.changes for p in points if p.changes][: given.trials]
    return Landscape(name=name, load=text, chosen=chosen, why=why, finalists=[(), *best])


def simulated(given: argparse.Namespace) -> list[list[str]]:
    """The search's choice beside the whole grid, on arrivals and moments it did not have."""
    rows = []
    for name in given.workload:
        found = landscape(given, name)
        held_out = search_of(given, found.load, given.seed + HELD_OUT)
        points = {
            changes: held_out.point(changes, given.conversations, 3)
            for changes in grid(held_out.plan.machinery.settings)
        }
        top = max(points.values(), key=lambda point: point.goodput)
        worst = min(points.values(), key=lambda point: point.goodput)
        own = points[found.chosen].goodput
        rows.append(
            [
                name,
                f"{1 - worst.goodput / top.goodput:.0%}",
                f"{points[()].goodput:.3f}",
                f"{top.goodput:.3f} ({top.name})",
                f"{own:.3f} ({said(found.chosen)})",
                f"{1 - own / top.goodput:.1%}",
            ]
        )
        print(markdown(HEAD, rows[-1:]), flush=True)
    return rows


HEAD = ["workload", "spread", "default/s", "best/s", "chosen/s", "regret"]


# ── real servers ────────────────────────────────────────────────────────────────────────────


def confirmation(given: argparse.Namespace, found: Landscape) -> Confirmation:
    load = options(BenchOptions, found.load)
    return Confirmation(
        folder=model_folder(given.folder),
        engine=engine_of(given),
        load=load,
        slo=parse_slo(load.slo[0]),
        block_s=given.block,
        runs_left=MOST_RUNS - 1,
        until_s=float("inf"),
        flags=(f"--slo={load.slo[0]}", "--no-log-requests"),
        watch=lambda text: print(f"{found.name}: {text}", flush=True),
        blocks=[b for b in found.blocks if b.round >= CONFIRMED],
    )


def confirm(given: argparse.Namespace, found: Landscape, save) -> None:
    """The tuner's own real runs: the default and the finalists in turns, and what wins."""
    runs = confirmation(given, found)
    turns = [(number, changes) for number in range(MOST_RUNS) for changes in found.finalists]
    for number, changes in turns[: MOST_RUNS - 1]:
        if found.block(changes, CONFIRMED + number) is None:
            block = runs.block(changes, CONFIRMED + number)
            runs.blocks.append(block)
            found.blocks.append(block)
            save()
    search = search_of(given, found.load, given.seed)
    points = [search.point(changes, 150, 1) for changes in found.finalists]
    found.chosen, found.why = choose(points, runs.results(found.finalists), "goodput")
    save()


def exhaust(given: argparse.Namespace, found: Landscape, save) -> None:
    """Every setting of the grid, round by round."""
    runs = confirmation(given, found)
    settings = grid(search_of(given, found.load, given.seed).plan.machinery.settings)
    for number in range(given.rounds):
        shift = number * len(settings) // given.rounds
        for changes in settings[shift:] + settings[:shift]:
            if found.block(changes, number) is None:
                found.blocks.append(runs.block(changes, number))
                save()


def regret(given: argparse.Namespace, found: Landscape) -> list[str]:
    """A row of the table."""
    own = [b for b in found.blocks if b.round < CONFIRMED]
    by: dict[Changes, list[Block]] = {}
    for block in own:
        by.setdefault(block.changes, []).append(block)
    sums = {changes: summed(changes, blocks) for changes, blocks in by.items()}
    top, worst = (pick(sums.values(), key=lambda one: one.goodput) for pick in (max, min))
    rounds = {b.round: b for b in by[top.changes] if not b.died}
    pairs = [(b, rounds[b.round]) for b in by[found.chosen] if b.round in rounds and not b.died]
    gain, (low, high) = paired_gain(pairs) if pairs else (float("nan"), (0.0, 0.0))
    chosen = sums[found.chosen]
    return [
        found.name,
        f"{1 - worst.goodput / max(top.goodput, 1e-9):.0%}",
        f"{sums[()].goodput:.2f}",
        f"{top.goodput:.2f} ({top.name})",
        f"{chosen.goodput:.2f} ({chosen.name})",
        f"{gain / (1 + gain):.1%} ({low / (1 + low):.1%} to {high / (1 + high):.1%})",
    ]


def real(given: argparse.Namespace) -> list[list[str]]:
    """All workloads; what is in the file is not run again."""
    found: dict[str, Landscape] = {}
    if given.file.exists():
        found = msgspec.json.decode(given.file.read_bytes(), type=dict[str, Landscape])

    def save() -> None:
        given.file.write_bytes(msgspec.json.encode(found))

    for name in given.workload:
        if name not in found:
            found[name] = landscape(given, name)
            save()
        confirm(given, found[name], save)
        exhaust(given, found[name], save)
        print(f"{name}: {found[name].why}", flush=True)
    return [regret(given, found[name]) for name in given.workload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--simulated", action="store_true", help="no server, a machine by formula")
    parser.add_argument("--file", type=Path, default=Path("regret.json"))
    parser.add_argument("--calibration", help="default: beside --file")
    parser.add_argument("--flags", default=f"--threads 1 --max-num-seqs {ROWS} --no-log-requests")
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS))
    parser.add_argument("--load", type=float, default=1.3, help="times what the default keeps")
    parser.add_argument("--ramp", type=float, default=120.0, help="requests/s at the ramp's end")
    parser.add_argument("--calibrate-seconds", type=float, default=30.0)
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--block", type=float, default=12.0, help="seconds of a real run")
    parser.add_argument("--rounds", type=int, default=2, help="of the whole grid")
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    given.workload = given.workload or list(WORKLOADS)
    given.calibration = given.calibration or str(given.file.with_suffix(".calibration.json"))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        if given.simulated:
            given.calibration = str(Path(scratch) / "formula.json")
            by_formula(given, Path(given.calibration))
        elif not Path(given.calibration).exists():
            measure(given)
        rows = simulated(given) if given.simulated else real(given)
    print(markdown(HEAD, rows))
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
