"""A tuning from end to end: calibrate, search, gate, confirm."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headway.advise.simulate.run import SIMULATED_URL, prepare_simulation
from headway.advise.tune.confirm import MAX_RUNS, Confirmation, ConfirmedSetting
from headway.advise.tune.finalists import Finalists
from headway.advise.tune.outcome import TuningReport, choose
from headway.advise.tune.search import SettingSearch
from headway.advise.tune.space import (
    Changes,
    changes_tokens,
    options_of,
    select_knobs,
    setting_name,
)
from headway.advise.words import duration
from headway.bench.calibrate import open_calibration
from headway.bench.run import prepare
from headway.bench.trial import run_once
from headway.bench.workload import rate_of
from headway.config.options import BenchOptions, EngineOptions, Seconds, to_arguments
from headway.config.options.against import against_arguments
from headway.config.options.simulate import SimulateOptions
from headway.config.options.tune import TuneOptions
from headway.core.errors import UsageError
from headway.core.slo import DEFAULT_CLASS, parse_classes
from headway.measure.server_process import ServerProcess

MIN_REQUESTS = 400
"""Requests of the search's traffic where the options give neither a number nor a duration."""
SERVER_START_S = 10.0
"""Seconds that a real run takes beside its block: start and end of the server."""
SEARCH_SHARE = 1 / 3
"""Share of the time that the search may take; the rest is for real runs."""
CALIBRATION_RAMP = (0.2, 1.8)
"""Load of a calibration: from and to these factors of the rate."""
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
    remaining_runs: int = MAX_RUNS
    gated: dict[str, str] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    def forecast(self) -> list[str]:
        """Return the stages with the time that each takes at most; UsageError as in `run`."""
        options, load = self.options, check_load(self.load)
        knobs = select_knobs(options.knobs, gate=options.gate)
        run_s = self.block_s(MAX_RUNS) + SERVER_START_S
        runs = MAX_RUNS if options.calibration else MAX_RUNS - 1
        names, search_s = ", ".join(row.name for row in knobs), 60 * options.minutes * SEARCH_SHARE
        stages = {
            f"a server is started and measured: {duration(run_s)} (none of it with --calibration "
            "FILE)": not options.calibration,
            f"up to {options.candidates} settings of {names} are simulated: at most "
            f"{duration(search_s)}": True,
            "settings that change tokens pass the gate, or do not count": options.gate,
            f"up to {options.trials} settings and the default run on the real server in turns: "
            f"at most {runs} runs of up to {duration(options.block + SERVER_START_S)}": bool(
                options.trials
            ),
        }
        planned = [text for text, is_planned in stages.items() if is_planned]
        head = f"tune {self.folder.name} for {' '.join(load.slo)}: at most {options.minutes:g} min"
        return [f"{head} (--minutes)", *(f"{i}. {text}" for i, text in enumerate(planned, 1))]

    def run(self) -> TuningReport:
        """Run all stages; raise UsageError for wrong options before anything is started."""
        knobs = select_knobs(self.options.knobs, gate=self.options.gate)
        self.load = check_load(self.load)
        with tempfile.TemporaryDirectory(prefix="headway-tune-") as scratch:
            search = self.search(Path(scratch))
            points = search.run(knobs, self.options.candidates, self.load.seed)
            finalists = Finalists(
                search=search, knobs=knobs, passes=lambda each: self.passes_gate(each)
            )
            best = finalists.choose(points, self.options.trials)
            confirmed = self.confirm(best, finalists) if self.options.trials else []
        points = finalists.simulated(points)
        usable = [p for p in points if setting_name(p.changes) not in self.failed]
        setting, why = choose(usable, confirmed, self.options.prefer)
        machinery = search.plan.machinery
        return TuningReport(
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
            real_runs=MAX_RUNS - self.remaining_runs,
            seconds=round(time.monotonic() - self.started_s, 1),
            extrapolated=search.extrapolated,
            defaults={row.name: row.now(machinery.settings) for row in knobs},
        )

    def search(self, scratch: Path) -> SettingSearch:
        """Return the search of settings on a machine that is calibrated, now if it was not
        before."""
        calibration = self.options.calibration or self.calibrate(scratch / "here.json")
        simulate_options = SimulateOptions(calibration=calibration, served_slo=self.load.slo)
        return SettingSearch(
            folder=self.folder,
            engine=self.engine,
            calibration=open_calibration(calibration),
            plan=prepare_simulation(self.folder, simulate_options, self.load, self.engine),
            prefer=self.options.prefer,
            seconds=SEARCH_SHARE * (self.until_s - time.monotonic()),
            watch=self.watch,
        )

    @property
    def until_s(self) -> float:
        return self.started_s + 60 * self.options.minutes

    @property
    def failed(self) -> set[str]:
        """Return the settings that the gate refused."""
        return {name for name, verdict in self.gated.items() if verdict != "passed"}

    def calibrate(self, path: Path) -> str:
        """Measure the default under a ramp of the load, in one real run; return the file's path."""
        self.watch("a server is started and measured: --calibration FILE saves that")
        self.remaining_runs -= 1
        load = replace(
            self.load,
            duration=Seconds(self.block_s(MAX_RUNS)),
            num_requests=None,
            calibrate=str(path),
            seed=self.load.seed + 1,
        )
        if ":" not in self.load.workload:  # a trace has its own times
            low, high = (factor * rate_of(self.load) for factor in CALIBRATION_RAMP)
            load = replace(load, arrivals="ramp", ramp_from=low, rate=high)
        flags = [*to_arguments(self.engine), *self.flags]
        with ServerProcess(self.folder, flags) as server:
            asyncio.run(run_once(server.url, load, "tune", None))
        return str(path)

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags that give servers the objectives."""
        return tuple(f"--slo={text}" for text in self.load.slo)

    def block_s(self, runs: int) -> float:
        """Return the seconds of a block so that this number of runs fits into the remaining
        time."""
        remaining_s = self.until_s - time.monotonic()
        return max(min(self.options.block, remaining_s / runs - SERVER_START_S), 2.0)

    def passes_gate(self, changes: Changes) -> bool:
        """Return whether the gate accepts the answers of this setting, where they may differ.

        Both models are loaded at once, so that they are compared token by token.
        """
        name = setting_name(changes)
        if not changes_tokens(changes) or name in self.gated:
            return name not in self.failed
        self.watch(f"gate, {name}")
        engine = to_arguments(options_of(self.engine, changes))
        gate = [f"--questions={self.options.questions}", f"--against={self.folder}", "--gate"]
        status = run_verb("eval", self.folder, *engine, *gate, *against_arguments(self.engine))
        self.gated[name] = {0: "passed", GATE_FAILED: "refused by the gate"}.get(
            status, f"not evaluated (status {status}): refused"
        )
        return status == 0

    def confirm(self, best: list[Changes], finalists: Finalists) -> list[ConfirmedSetting]:
        """Run the default and the finalists on real servers, in turns."""
        slos = parse_classes(self.load.slo)
        confirmation = Confirmation(
            folder=self.folder,
            engine=self.engine,
            load=self.load,
            slo=slos.get(DEFAULT_CLASS),
            block_s=self.block_s(max(self.remaining_runs, 1)),
            remaining_runs=self.remaining_runs,
            until_s=self.until_s,
            flags=self.flags,
            watch=self.watch,
            after=finalists.after,
        )
        confirmed = confirmation.run([(), *best])
        for each in confirmed:
            each.reason = finalists.reasons.get(each.changes, "")
        self.remaining_runs = confirmation.remaining_runs
        return confirmed


def check_load(load: BenchOptions) -> BenchOptions:
    """Return the load as the tuner takes it; UsageError for options that it cannot take."""
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
        load = replace(load, num_requests=MIN_REQUESTS)
    prepare(SIMULATED_URL, load)  # what is wrong in its words is said before a server starts
    return load


def run_verb(name: str, *words: str | Path) -> int:
    """Run another verb in a process of its own and return its exit status."""
    command = [sys.executable, "-m", "headway.cli.main", name, *map(str, words)]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def as_json(report: TuningReport) -> bytes:
    """The report."""
    return msgspec.json.encode(report)
