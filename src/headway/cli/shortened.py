"""`headway eval URL --suite context`: tokens saved by shortened documents, right answers lost."""

import sys
from typing import TYPE_CHECKING

import msgspec

from headway.cli.common import GATE_FAILED, open_served_model
from headway.config.options import EvalOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def evaluate(call: "VerbCall") -> int:
    """Ask, print the table; return 5 with --gate where random cuts are as good."""
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

    def print_column(column: Column) -> None:
        right, num_questions, _, _ = column.share()
        print(
            f"keep {column.keep:g}, {column.method}: {right} of {num_questions} right",
            file=sys.stderr,
        )

    with open_served_model(url, options, options.model) as model:
        report = ask(
            model,
            questions=options.questions,
            seed=options.test_seed,
            skills=skills,
            levels=sorted(set(options.levels)) or LEVELS,
            on_column=print_column,
        )
    if options.json:
        write(options.json, msgspec.json.encode(report))
    print(table(report))
    return GATE_FAILED if options.gate and not report.better_than_random else 0
