"""`headway simulate FOLDER`: the report that `headway bench` would write, without a server."""

import sys
import time
from typing import TYPE_CHECKING

import headway
from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import Call


def simulate(call: "Call") -> int:
    """Simulate the load on the server that the options describe, and report."""
    if len(call.positionals) > 1:
        raise UsageError("simulate takes one folder.", "headway simulate FOLDER")
    from headway.advise.simulate import run, show
    from headway.cli.bench import check_outputs

    load: BenchOptions = call.options[BenchOptions]
    options: SimulateOptions = call.options[SimulateOptions]
    folder = model_folder(call.positionals[0] if call.positionals else None)
    if load.find_goodput or load.calibrate:
        raise UsageError(
            "simulate neither searches a rate nor calibrates.",
            "headway plan says what a server can take; headway bench calibrates one.",
        )
    wanted = run.plan(folder, options, load, call.options[EngineOptions])
    check_outputs(load)
    if "--dry-run" in call.switches:
        print(show.outline(wanted))
        return 0
    started_s = time.perf_counter()
    report = run.simulate(wanted, headway.__version__, progress(started_s))
    show.publish(report, load)
    print(f"simulated in {time.perf_counter() - started_s:.1f} s", file=sys.stderr)
    return 0


def progress(started_s: float):  # type: ignore[no-untyped-def]
    """Says how far it is, once it has taken two seconds."""

    def watch(done: int, total: int) -> None:
        if 0 < done < total and time.perf_counter() - started_s > 2:
            print(f"run {done} of {total} is done", file=sys.stderr)

    return watch
