"""`headway plan FOLDER`: which machines, how many, at what cost, and what breaks first."""

import sys
from typing import TYPE_CHECKING

import headway
from headway.cli.common import check_writable, only_folder, report_console
from headway.config.options import BenchOptions, EngineOptions, PlanOptions

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def plan(call: "VerbCall") -> int:
    """Print and write the plan for the traffic of the options; return 1 where none is enough."""
    folder = only_folder(call, "plan", "headway plan FOLDER --slo ttft=1s,tpot=50ms")
    import msgspec

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
    check_writable(load.json, load.html)
    answers = answer.plan_capacity(
        folder,
        options,
        load,
        call.options[EngineOptions],
        headway.__version__,
        watch=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if load.json:
        write(load.json, msgspec.json.encode(answers))
    if load.html:
        write(load.html, page.html(answers).encode())
    answer.show_plan(answers, report_console(200))
    return 0 if any(row.servers is not None for row in answers.rows) else 1
