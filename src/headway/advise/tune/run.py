"""A tuning from end to end: measured, searched, gated, confirmed."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headway.advise.simulate.run import NOWHERE, plan
from headway.advise.tune.confirm import MOST_RUNS, Confirmation, Confirmed
from headway.advise.tune.finalists import Finalists
from headway.advise.tune.outcome import Tuned, choose
from headway.advise.tune.search import Search
from headway.advise.tune.space import Changes, changes_tokens, chosen, options_of, said
from headway.bench.calibrate import open_calibration
from headway.bench.run import prepare
from headway.bench.trial import once
from headway.bench.workload import rate_of
from headway.config.options import BenchOptions, EngineOptions, Seconds, to_arguments
from headway.config.options.against import against_arguments
from headway.config.options.simulate import SimulateOptions
from headway.config.options.tune import TuneOptions
from headway.core.errors import UsageError
from headway.core.slo import DEFAULT_CLASS, parse_classes
from headway.measure.started import Started

LEAST_REQUESTS = 400
"""The search's traffic, where nobody says how much."""
START_S = 10.0
"""What a real run takes beside its block: start and end."""
SEARCH_SHARE = 1 / 3
"""Of the time, what the search may take; the rest is for real runs."""
RAMP = (0.2, 1.8)
"""A calibration's load, from and to so many times the rate."""
GATE_FAILED = 5

Watch = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Tuning:
    """One call of `headway tune`."""

    folder: Path
    options: TuneOptions
    load: BenchOptions
    engine: EngineOptions
    watch: Watch = lambda text: None
    runs_left: int = MOST_RUNS
    gated: dict[str, str] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    def run(self) -> Tuned:
        """Everything; raises UsageError before anything is started where the options are wrong."""
        knobs = chosen(self.options.knobs, gate=self.options.gate)
        self.load = checked(self.load)
        with tempfile.TemporaryDirectory(prefix="headway-tune-") as scratch:
            search = self.search(Path(scratch))
            points = search.run(knobs, self.options.candidates, self.load.seed)
            finalists = Finalists(
                search=search, knobs=knobs, passes=lambda each: self.may_answer(each)
            )
            best = finalists.choose(points, self.options.trials)
            confirmed = self.confirm(best, finalists) if self.options.trials else []
        points = finalists.simulated(points)
        usable = [p for p in points if said(p.changes) not in self.failed]
        setting, why = choose(usable, confirmed, self.options.prefer)
        machinery = search.plan.machinery
        return Tuned(
            model=machinery.model,
            label=machinery.label,
            prefer=self.options.prefer,
            chosen=setting,
            why=why,
            confirmed=confirmed,
            points=usable,
            refused=search.refused,
            gated=self.gated,
            num_simulated=search.num_simulated,
            num_left_out=search.num_left_out,
            real_runs=MOST_RUNS - self.runs_left,
            seconds=round(time.monotonic() - self.started_s, 1),
            extrapolated=search.extrapolated,
            defaults={row.name: row.now(machinery.settings) for row in knobs},
        )

    def search(self, scratch: Path) -> Search:
        """Of settings under the load, on a machine that was measured, now if it was not before."""
        calibration = self.options.calibration or self.calibrate(scratch / "here.json")
        told = SimulateOptions(calibration=calibration, served_slo=self.load.slo)
        return Search(
            folder=self.folder,
            engine=self.engine,
            calibration=open_calibration(calibration),
            plan=plan(self.folder, told, self.load, self.engine),
            prefer=self.options.prefer,
            seconds=SEARCH_SHARE * (self.until_s - time.monotonic()),
            watch=self.watch,
        )

    @property
    def until_s(self) -> float:
        return self.started_s + 60 * self.options.minutes

    @property
    def failed(self) -> set[str]:
        """Settings that the gate did not let pass."""
        return {name for name, verdict in self.gated.items() if verdict != "passed"}

    def calibrate(self, path: Path) -> str:
        """Measure the default under a ramp of the load: one real run."""
        self.watch("a server is started and measured: --calibration FILE saves that")
        self.runs_left -= 1
        load = replace(
            self.load,
            duration=Seconds(self.block_s(MOST_RUNS)),
            num_requests=None,
            calibrate=str(path),
            seed=self.load.seed + 1,
        )
        if ":" not in self.load.workload:  # a trace has its own times
            low, high = (factor * rate_of(self.load) for factor in RAMP)
            load = replace(load, arrivals="ramp", ramp_from=low, rate=high)
        flags = [*to_arguments(self.engine), *self.flags]
        with Started(self.folder, flags) as server:
            asyncio.run(once(server.url, load, "tune", None))
        return str(path)

    @property
    def flags(self) -> tuple[str, ...]:
        """What servers are told of the objectives."""
        return tuple(f"--slo={text}" for text in self.load.slo)

    def block_s(self, runs: int) -> float:
        """So long may each of so many runs be, with what is left of the time."""
        left_s = self.until_s - time.monotonic()
        return max(min(self.options.block, left_s / runs - START_S), 2.0)

    def may_answer(self, changes: Changes) -> bool:
        """Whether the gate lets the answers of this setting pass, where they are others.

        Both are loaded at once, so that they are compared token by token.
        """
        name = said(changes)
        if not changes_tokens(changes) or name in self.gated:
            return name not in self.failed
        self.watch(f"gate, {name}")
        engine = to_arguments(options_of(self.engine, changes))
        gate = [f"--questions={self.options.questions}", f"--against={self.folder}", "--gate"]
        status = verb("eval", self.folder, *engine, *gate, *against_arguments(self.engine))
        self.gated[name] = {0: "passed", GATE_FAILED: "refused by the gate"}.get(
            status, f"not evaluated (status {status}): refused"
        )
        return status == 0

    def confirm(self, best: list[Changes], finalists: Finalists) -> list[Confirmed]:
        """The default and the finalists on real servers, in turns."""
        slos = parse_classes(self.load.slo)
        confirmation = Confirmation(
            folder=self.folder,
            engine=self.engine,
            load=self.load,
            slo=slos.get(DEFAULT_CLASS),
            block_s=self.block_s(max(self.runs_left, 1)),
            runs_left=self.runs_left,
            until_s=self.until_s,
            flags=self.flags,
            watch=self.watch,
            after=finalists.after,
        )
        found = confirmation.run([(), *best])
        for each in found:
            each.taken = finalists.taken.get(each.changes, "")
        self.runs_left = confirmation.runs_left
        return found


def checked(load: BenchOptions) -> BenchOptions:
    """The load as the tuner takes it; UsageError for what it cannot."""
    if not load.slo:
        raise UsageError("tune needs objectives.", "Add --slo ttft=500ms,tpot=50ms.")
    if load.concurrency is not None:
        raise UsageError(
            "tune searches for goodput under a rate; --concurrency has none.", "Give --rate."
        )
    if load.find_goodput or load.calibrate:
        raise UsageError(
            "tune neither searches a rate nor writes a calibration.",
            "headway bench does both.",
        )
    is_trace = ":" in load.workload
    if load.num_requests is None and load.duration is None and not is_trace:
        load = replace(load, num_requests=LEAST_REQUESTS)
    prepare(NOWHERE, load)  # what is wrong in its words is said before a server starts
    return load


def verb(name: str, *words: str | Path) -> int:
    """Another verb, in a process of its own, to its end: its exit status."""
    command = [sys.executable, "-m", "headway.cli.main", name, *map(str, words)]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def as_json(found: Tuned) -> bytes:
    """The report."""
    return msgspec.json.encode(found)
