"""`headway eval URL --suite examples --data FILE`: how many examples of recorded chats help."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli.common import served_model
from headway.core.errors import UsageError
from headway.core.options import EvalOptions

if TYPE_CHECKING:
    from headway.cli.main import Call


def evaluate(call: "Call") -> int:
    """Ask, print the table."""
    from headway.evals.fewer import Column, ask, read, table, with_examples
    from headway.evals.url import is_url
    from headway.measure.saved import write

    options: EvalOptions = call.options[EvalOptions]
    [url] = call.positionals or [""]
    if not is_url(url):
        raise UsageError(
            "--suite examples asks a server.", "headway eval URL --suite examples --data FILE"
        )
    if not options.data:
        raise UsageError(
            "--suite examples needs recorded chats.", "--data FILE: a chat body a line, as JSON."
        )
    for name in ("against", "html", "gate", "skills", "levels"):
        if getattr(options, name):
            raise UsageError(f"--suite examples takes no --{name}.", f"Leave --{name} out.")
    chats = read(Path(options.data))
    if "--dry-run" in call.switches:
        found = with_examples(chats)
        print(f"examples: {len(found)} of {len(chats)} chats, {options.questions} asked at most")
        return 0

    def told(column: Column) -> None:
        same = f"{sum(column.same)} of {len(column.same)} answers the same"
        print(f"{column.examples} examples: {same}", file=sys.stderr)

    with served_model(url, options, options.model) as model:
        report = ask(
            model,
            chats,
            most_chats=options.questions,
            seed=options.test_seed,
            on_column=told,
        )
        report.price(model.stats())
    if options.json:
        write(options.json, msgspec.json.encode(report))
    print(table(report))
    return 0
