"""`headway tune FOLDER`: which options serve a traffic best, or that nothing is to be gained."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions, TuneOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.advise.tune.outcome import Tuned
    from headway.cli.main import Call

QUIET_S = 2.0
SHOWN = 12
"""Rows of the table at most, beside those that ran for real."""


def tune(call: "Call") -> int:
    """Search simulated, confirm real, and write what `--write`, `--json` and `--html` name."""
    if len(call.positionals) > 1:
        raise UsageError("tune takes one folder.", "headway tune FOLDER --slo ttft=1s,tpot=50ms")
    from headway.advise.tune import outcome, page
    from headway.advise.tune.run import Tuning, as_json
    from headway.measure.saved import write

    options: TuneOptions = call.options[TuneOptions]
    load: BenchOptions = call.options[BenchOptions]
    folder = model_folder(call.positionals[0] if call.positionals else None)
    for path in (load.json, load.html):
        if path:
            write(path, b"")
    if options.write:
        outcome.check_place(options.write)
    tuning = Tuning(
        folder=folder,
        options=options,
        load=load,
        engine=call.options[EngineOptions],
        watch=progress(),
    )
    found = tuning.run()
    text = outcome.yaml_of(found)
    if load.json:
        write(load.json, as_json(found))
    if load.html:
        write(load.html, page.html(found).encode())
    if options.write and found.gains:
        outcome.write_whole(options.write, text)
    show(found)
    print(text, end="")
    if options.write:
        print(f"# {options.write} is {'written' if found.gains else 'left as it is'}")
    return 0


def progress() -> Callable[[str], None]:
    """Says what is done now, at most once in two seconds unless it is a real run."""
    told_s = time.monotonic()

    def watch(text: str) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s > QUIET_S or not text[:1].isdigit():
            told_s = now_s
            print(text, file=sys.stderr, flush=True)

    return watch


def show(found: "Tuned") -> None:
    """The finalists and what was confirmed, as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from headway.advise.tune.outcome import lines_of
    from headway.advise.words import duration, percent

    console = Console(width=None if sys.stdout.isatty() else 160)
    real = {each.changes: each for each in found.confirmed}
    table = Table(title=f"last rung and finalists, {found.label}", title_justify="left")
    for name in ("setting", "goodput", "in SLO", "TTFT p50", "TPOT p50", "real", "gain", "95%"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for number, point in enumerate(found.points):
        if number >= SHOWN and point.changes not in real:
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
    for line in lines_of(found):
        console.print(line, highlight=False, markup=False)
