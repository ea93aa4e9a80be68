"""`headway plan FOLDER`: which machines, how many, at what cost, and what breaks first."""

import sys
from typing import TYPE_CHECKING

import headway
from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions, PlanOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import Call


def plan(call: "Call") -> int:
    """Plan for the traffic that the options describe."""
    if len(call.positionals) > 1:
        raise UsageError("plan takes one folder.", "headway plan FOLDER --slo ttft=1s,tpot=50ms")
    import msgspec
    from rich.console import Console

    from headway.advise.plan import answer, page
    from headway.advise.plan.machines import COLUMNS, TABLE
    from headway.measure.saved import write

    options: PlanOptions = call.options[PlanOptions]
    if options.machines == ["list"]:
        print("  ".join(COLUMNS))
        for row in TABLE:
            print("  ".join("" if cell is None else str(cell) for cell in row))
        return 0
    load: BenchOptions = call.options[BenchOptions]
    for path in (load.json, load.html):
        if path:
            write(path, b"")
    folder = model_folder(call.positionals[0] if call.positionals else None)
    found = answer.plan(folder, options, load, call.options[EngineOptions], headway.__version__)
    if load.json:
        write(load.json, msgspec.json.encode(found))
    if load.html:
        write(load.html, page.html(found).encode())
    answer.show(found, Console(width=None if sys.stdout.isatty() else 200))
    return 0 if any(row.servers is not None for row in found.rows) else 1
