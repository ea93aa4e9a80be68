"""`headway tune FOLDER`: which options serve a traffic best, or that none gains anything."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.cli.common import check_writable, only_folder, report_console
from headway.config.options import BenchOptions, EngineOptions, TuneOptions

if TYPE_CHECKING:
    from headway.advise.tune.outcome import TuningReport
    from headway.cli.main import VerbCall

PROGRESS_INTERVAL_S = 2.0
MAX_ROWS = 12
"""Maximum rows of the table, besides those of real runs."""


def tune(call: "VerbCall") -> int:
    """Search in simulation, confirm in real runs, and write the output files."""
    folder = only_folder(call, "tune", "headway tune FOLDER --slo ttft=1s,tpot=50ms")
    from headway.advise.tune import outcome, page
    from headway.advise.tune.run import Tuning, as_json
    from headway.measure.saved import write

    options: TuneOptions = call.options[TuneOptions]
    load: BenchOptions = call.options[BenchOptions]
    check_writable(load.json, load.html)
    if options.write:
        outcome.check_writable(options.write)
    tuning = Tuning(
        folder=folder,
        options=options,
        load=load,
        engine=call.options[EngineOptions],
        watch=progress(),
    )
    if "--dry-run" in call.switches:
        print("\n".join(tuning.forecast()))
        return 0
    for line in tuning.forecast():
        tuning.watch(line if not line[:1].isdigit() else f"  {line}")
    tuned = tuning.run()
    text = outcome.format_yaml(tuned)
    if load.json:
        write(load.json, as_json(tuned))
    if load.html:
        write(load.html, page.html(tuned).encode())
    if options.write and tuned.gains:
        outcome.write_atomically(options.write, text)
    print_tuned(tuned)
    print(text, end="")
    if options.write:
        print(f"# {options.write} is {'written' if tuned.gains else 'left as it is'}")
    return 0


def progress() -> Callable[[str], None]:
    """Return a callback that prints progress: simulated steps at most every two seconds."""
    printed_s = time.monotonic()

    def watch(text: str) -> None:
        nonlocal printed_s
        now_s = time.monotonic()
        if now_s - printed_s > PROGRESS_INTERVAL_S or not text[:1].isdigit():
            printed_s = now_s
            print(text, file=sys.stderr, flush=True)

    return watch


def print_tuned(tuned: "TuningReport") -> None:
    """Print the finalists and the confirmed settings as tables."""
    from rich.markup import escape
    from rich.table import Table

    from headway.advise.tune.outcome import format_lines
    from headway.advise.words import duration, percent

    console = report_console()
    real = {each.changes: each for each in tuned.confirmed}
    table = Table(title=f"last rung and finalists, {tuned.label}", title_justify="left")
    for name in ("setting", "goodput", "in SLO", "TTFT p50", "TPOT p50", "real", "gain", "95%"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for number, point in enumerate(tuned.points):
        if number >= MAX_ROWS and point.changes not in real:
            continue
        row = [escape(point.name), f"{point.goodput:.2f}/s", percent(point.in_slo)]
        row += [duration(point.ttft_s), duration(point.tpot_s)]
        one = real.get(point.changes)
        if one is not None and one.runs and not one.died:
            low, high = one.gain_interval
            row.append(f"{one.goodput:.2f}/s")
            if one.changes:
                row += [f"{one.gain:+.1%}", f"{low:+.1%} to {high:+.1%}"]
        table.add_row(*row)
    console.print(table)
    for line in format_lines(tuned):
        console.print(line, highlight=False, markup=False)
