"""`headway eval URL --suite context`: what shortened documents save, and cost in right answers."""

import sys
from typing import TYPE_CHECKING

import msgspec

from headway.cli.common import served_model
from headway.config.options import EvalOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import Call

GATE_FAILED = 5


def evaluate(call: "Call") -> int:
    """Ask, print the table; 5 when the gate is asked for and chance cuts as well."""
    from headway.evals.shortened import SKILLS, Column, ask, table
    from headway.evals.skills.suite import LEVELS
    from headway.evals.url import is_url
    from headway.measure.saved import write

    options: EvalOptions = call.options[EvalOptions]
    [url] = call.positionals or [""]
    if not is_url(url):
        raise UsageError("--suite context asks a server.", "headway eval URL --suite context")
    if options.against or options.html:
        given = "--against" if options.against else "--html"
        raise UsageError(f"--suite context takes no {given}.", f"Leave {given} out.")
    skills = options.skills or list(SKILLS)
    if wrong := sorted(set(skills) - set(SKILLS)):
        raise UsageError(f"--skills: {wrong[0]} has no document.", f"{', '.join(SKILLS)}.")
    if "--dry-run" in call.switches:
        print(f"context: {', '.join(skills)}; {options.questions} questions each at each level")
        return 0

    def told(column: Column) -> None:
        right, asked, _, _ = column.share()
        print(f"keep {column.keep:g}, {column.method}: {right} of {asked} right", file=sys.stderr)

    with served_model(url, options, options.model) as model:
        report = ask(
            model,
            questions=options.questions,
            seed=options.test_seed,
            skills=skills,
            levels=sorted(set(options.levels)) or LEVELS,
            on_column=told,
        )
    if options.json:
        write(options.json, msgspec.json.encode(report))
    print(table(report))
    return GATE_FAILED if options.gate and not report.better_than_random else 0
