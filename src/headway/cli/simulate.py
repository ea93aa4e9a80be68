"""`headway simulate FOLDER`: the report that `headway bench` would write, without a server."""

import sys
import time
from typing import TYPE_CHECKING

import headway
from headway.cli.common import check_writable, only_folder
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def simulate(call: "VerbCall") -> int:
    """Simulate the load on the server of these options, and report."""
    folder = only_folder(call, "simulate", "headway simulate FOLDER")
    from headway.advise.simulate import run, show

    load: BenchOptions = call.options[BenchOptions]
    options: SimulateOptions = call.options[SimulateOptions]
    if load.find_goodput or load.calibrate:
        raise UsageError(
            "simulate neither searches a rate nor calibrates.",
            "headway plan says what a server can take; headway bench calibrates one.",
        )
    plan = run.prepare_simulation(folder, options, load, call.options[EngineOptions])
    check_writable(load.json, load.csv, load.html)
    if "--dry-run" in call.switches:
        print(show.outline(plan))
        return 0
    started_s = time.perf_counter()
    report = run.simulate(plan, headway.__version__, progress(started_s))
    show.publish(report, load)
    print(f"simulated in {time.perf_counter() - started_s:.1f} s", file=sys.stderr)
    return 0


def progress(started_s: float):  # type: ignore[no-untyped-def]
    """Return a callback that prints progress after two seconds."""

    def watch(done: int, total: int) -> None:
        if 0 < done < total and time.perf_counter() - started_s > 2:
            print(f"run {done} of {total} is done", file=sys.stderr)

    return watch
