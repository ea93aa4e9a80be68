"""The tuner's regret: what its choice is short of the best of a whole grid of settings.

    python benchmarks/tuner_regret.py headway-tiny --simulated         ten minutes, no server
    python benchmarks/tuner_regret.py headway-tiny --simulated --contradict policy
    python benchmarks/tuner_regret.py headway-tiny --file regret.json  50 minutes, in pieces
    python benchmarks/tuner_regret.py headway-tiny --file regret.json --replay

Three workloads, 16 settings of rows, tokens a step and policy. `headway tune`'s own search ranks
them in simulation, its own rule takes three finalists, its own confirmation runs them and the
default on real servers, seven runs in all. Then every setting runs on a real server, the same
arrivals for all of a round, which nobody was chosen by, the order turned from round to round. Each
run is kept in `--file` as it ends: the script goes on where it stopped, so that a grid fits several
quiet hours. Rates are `--load` times what the default keeps in simulation, and the objective for a
token is what a step of a quarter of the rows takes, so that settings differ on any machine.

Regret is 1 - goodput of the choice / goodput of the best, with the 95% of a paired bootstrap
between the two; the best of 16 is best by luck too, so it is an upper bound. `--replay` takes the
tuner's seven runs from the grid of the file, from each of its rounds on: what it would choose, with
no server. `--simulated` does all of it on a machine by formula (20 ms a step, 3 ms a token, 10% by
chance): the tuner's runs and the grid are simulated with arrivals and moments of the machine that
the search did not have. With `--contradict policy` the search is wrong about it: the
machine serves `fcfs` as the search has `slo`, and the other way round; of rows most as fewest.
"""

import argparse
import asyncio
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from common import markdown, serving
from headway.advise.simulate.run import NOWHERE, Plan, once, plan
from headway.advise.tune.confirm import MOST_RUNS, Block, Confirmation, fill, paired_gain, summed
from headway.advise.tune.finalists import Finalists, turned
from headway.advise.tune.outcome import choose
from headway.advise.tune.search import Search
from headway.advise.tune.space import KNOBS, Changes, Knob, ordered, said
from headway.assemble import plan_settings
from headway.bench.calibrate import open_calibration
from headway.bench.run import hastened
from headway.bench.trial import once as bench_once
from headway.config.options import BenchOptions, EngineOptions, SimulateOptions, read_options
from headway.config.resolve import Settings
from headway.core.plan import Description
from headway.core.service import Alone
from headway.core.slo import parse_slo
from headway.perf.frontend import HostCost
from headway.perf.model import Work
from headway.spec.embedded import model_folder
from headway.telemetry.calibration import Calibration, StepColumns, fingerprint

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
HEAD = ["workload", "spread", "default/s", "best/s", "chosen/s", "regret"]
SIMULATED_HEAD = [*HEAD, "of the search alone"]


class Landscape(msgspec.Struct, kw_only=True):
    """One workload: what it is, what was chosen and why, and every run so far."""

    name: str
    load: str
    chosen: Changes = ()
    why: str = ""
    finalists: list[Changes] = []
    """What the tuner ran for real, the default first."""
    taken: list[str] = []
    """Why it ran each."""
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
    own = {row.name: row for row in KNOBS}
    return [replace(own[name], values=lambda s, v=values: list(v)) for name, values in GRID.items()]


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


def tune(given: argparse.Namespace, found: Landscape, runs: Confirmation) -> Changes:
    """Searched, and confirmed by these runs; what the search alone would choose."""
    search = search_of(given, found.load, given.seed)
    points = search.run(knobs(), 96, given.seed)
    finalists = Finalists(search=search, knobs=knobs())
    runs.after = finalists.after
    confirmed = runs.run([(), *finalists.choose(points, given.trials)])
    found.finalists = [each.changes for each in confirmed]
    found.taken = [finalists.taken.get(changes, "") for changes in found.finalists]
    simulated = finalists.simulated(points)
    found.chosen, found.why = choose(simulated, confirmed, "goodput")
    return choose(points, [], "goodput")[0]


def confirmation(kind: type, given: argparse.Namespace, one: Landscape, **more) -> Confirmation:
    """The tuner's runs of this kind, one less than it may start: a calibration is one too."""
    load = options(BenchOptions, one.load)
    return kind(
        folder=model_folder(given.folder),
        engine=engine_of(given),
        load=load,
        slo=parse_slo(load.slo[0]),
        block_s=given.block,
        runs_left=MOST_RUNS - 1,
        until_s=float("inf"),
        flags=(f"--slo={load.slo[0]}", "--no-log-requests"),
        watch=lambda text: print(f"{one.name}: {text}", flush=True),
        **more,
    )


# ── a machine by formula ────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Simulated(Confirmation):
    """Runs that are simulated, on a machine that may contradict the search in one option."""

    search: Search
    contradict: str

    def block(self, changes: Changes, number: int) -> Block:
        bench = self.traffic(NOWHERE, number)
        wanted = self.search.planned(mirrored(self.search, changes, self.contradict), bench)
        _, world = once(wanted, HELD_OUT + number, 1.0, "benchmark")
        made = Block(changes=changes, round=number)
        fill(made, bench, world.exchanges, self.slo)
        return made


def mirrored(search: Search, changes: Changes, name: str) -> Changes:
    """A setting with one option on the other side: the most rows for the fewest."""
    if not name:
        return changes
    ladder = [*GRID[name], None]
    value = ladder[-1 - ladder.index(dict(changes).get(name))]
    return turned(changes, name, value, search.plan.machinery.settings)


def simulated(given: argparse.Namespace) -> list[list[str]]:
    """The tuner's choice beside the whole grid, on arrivals and moments its search did not have."""
    rows, wrong = [], given.contradict
    for name in given.workload:
        found = Landscape(name=name, load=load_of(given, WORKLOADS[name]))
        held_out = search_of(given, found.load, given.seed + HELD_OUT)
        runs = confirmation(Simulated, given, found, search=held_out, contradict=wrong)
        runs.block_s = given.conversations / 2 / runs.load.rate
        alone = tune(given, found, runs)
        goodput = {}
        for changes in grid(held_out.plan.machinery.settings):
            served = mirrored(held_out, changes, wrong)
            goodput[changes] = held_out.point(served, given.conversations, 3).goodput
        tell(found)
        rows.append([name, *compared(goodput, found.chosen, alone)])
        print(markdown(SIMULATED_HEAD, rows[-1:]), flush=True)
    return rows


def compared(goodput: dict[Changes, float], chosen: Changes, alone: Changes) -> list[str]:
    """A row of the simulated table, without its workload."""
    top = max(goodput, key=lambda changes: goodput[changes])
    best, own = goodput[top], goodput[chosen]
    return [
        f"{1 - min(goodput.values()) / best:.0%}",
        f"{goodput[()]:.3f}",
        f"{best:.3f} ({said(top)})",
        f"{own:.3f} ({said(chosen)})",
        f"{1 - own / best:.1%}",
        f"{1 - goodput[alone] / best:.1%}",
    ]


def tell(found: Landscape) -> None:
    """What ran for real, and why."""
    for changes, why in zip(found.finalists[1:], found.taken[1:]):
        print(f"{found.name}: {said(changes)}: {why}")
    print(f"{found.name}: {found.why}", flush=True)


# ── real servers ────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Kept(Confirmation):
    """Real runs that are in the file as they end, and are not made again."""

    found: Landscape
    save: Callable[[], None]

    def block(self, changes: Changes, number: int) -> Block:
        made = self.found.block(changes, CONFIRMED + number)
        if made is None:
            made = Confirmation.block(self, changes, CONFIRMED + number)
            self.found.blocks.append(made)
            self.save()
        return made


@dataclass(slots=True, kw_only=True)
class Replayed(Confirmation):
    """The tuner's runs taken from the grid, from one of its rounds on."""

    found: Landscape
    first: int
    rounds: int

    def block(self, changes: Changes, number: int) -> Block:
        made = self.found.block(changes, (self.first + number) % self.rounds)
        assert made is not None, f"the file has no run of {said(changes)}"
        return msgspec.structs.replace(made, round=number)


def exhaust(given: argparse.Namespace, found: Landscape, save: Callable[[], None]) -> None:
    """Every setting of the grid, round by round."""
    runs = confirmation(Confirmation, given, found)
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
    kept = read(given.file) if given.file.exists() else {}

    def save() -> None:
        given.file.write_bytes(msgspec.json.encode(kept))

    for name in given.workload:
        if name not in kept:
            kept[name] = Landscape(name=name, load=load_of(given, WORKLOADS[name]))
            save()
        found = kept[name]
        tune(given, found, confirmation(Kept, given, found, found=found, save=save))
        save()
        exhaust(given, found, save)
        tell(found)
    return [regret(given, kept[name]) for name in given.workload]


def replay(given: argparse.Namespace) -> list[list[str]]:
    """The workloads that the file has, with the tuner's runs from each round of the grid on."""
    rows = []
    for name, found in read(given.file).items():
        rounds = 1 + max(block.round for block in found.blocks if block.round < CONFIRMED)
        for first in range(rounds if name in given.workload else 0):
            more = {"found": found, "first": first, "rounds": rounds}
            tune(given, found, confirmation(Replayed, given, found, **more))
            tell(found)
            rows.append([f"{name}, from round {first + 1} on", *regret(given, found)[1:]])
    return rows


def read(path: Path) -> dict[str, Landscape]:
    """The workloads of a file, by name."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Landscape])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--simulated", action="store_true", help="no server, a machine by formula")
    parser.add_argument("--contradict", default="", choices=tuple(GRID), help="with --simulated")
    parser.add_argument("--replay", action="store_true", help="no server, the runs of --file")
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
        elif not (given.replay or Path(given.calibration).exists()):
            measure(given)
        rows = (simulated if given.simulated else replay if given.replay else real)(given)
    print(markdown(SIMULATED_HEAD if given.simulated else HEAD, rows))
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
