"""`headway claims [FOLDER | URL]`: what serving literature promises, measured here."""

import sys
from typing import TYPE_CHECKING

from headway.cli.common import engine_arguments, model_folder
from headway.core.errors import UsageError
from headway.core.options import ClaimsOptions, EngineOptions

if TYPE_CHECKING:
    from headway.claims.subject import Subject
    from headway.claims.table import Report
    from headway.cli.main import Call

EXAMPLE = "headway claims FOLDER --out claims.html"


def claims(call: "Call") -> int:
    """Ask every claim, show the verdicts, and write what `--out` and `--json` name."""
    if len(call.positionals) > 1:
        raise UsageError("claims takes one folder or one URL.", EXAMPLE)
    import msgspec

    from headway.claims import page
    from headway.claims.table import CLAIMS, chosen, empty, run
    from headway.measure.saved import write

    options: ClaimsOptions = call.options[ClaimsOptions]
    if options.only == ["list"]:
        for claim in CLAIMS:
            print(f"{claim.key:<18} {claim.family:<15} {claim.says}")
        return 0
    wanted = chosen(options.only)
    for path in (options.out, options.json):
        if path:
            write(path, b"")  # what cannot be written is said before anything is measured
    named = call.positionals[0] if call.positionals else None
    engine = engine_arguments(call.options[EngineOptions])
    with subject_of(named, options, engine) as subject:
        report = empty(subject)
        try:
            run(subject, wanted, report)
        finally:  # a run that is cut short leaves what it has
            if options.json:
                write(options.json, msgspec.json.encode(report))
            if options.out:
                write(options.out, page.html(report).encode())
            show(report)
    return 0


def subject_of(
    named: str | None, options: ClaimsOptions, engine: dict[str, str] | None = None
) -> "Subject":
    """Who is asked: a URL, or a folder with these options of the engine."""
    from headway.claims.subject import Subject

    def watch(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if named is not None and named.startswith(("http://", "https://")):
        if engine:
            raise UsageError(
                f"A server that runs has its options already: {', '.join(engine)}.",
                "Leave them out, or name a folder.",
            )
        url = named.rstrip("/").removesuffix("/v1")
        return Subject(url=url, api_key=options.api_key, repeats=options.runs, watch=watch)
    folder = model_folder(named)
    return Subject(folder=folder, repeats=options.runs, options=engine or {}, watch=watch)


def show(report: "Report") -> None:
    """A line a claim, and how many hold."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{report.asked} on {report.machine}", title_justify="left")
    for name in ("claim", "measured", "verdict", "s"):
        table.add_column(name, justify="right" if name == "s" else "left")
    for row in report.rows:
        if row.finding is None:
            table.add_row(row.key, escape(row.missing), "not measured", "")
        else:
            first = row.finding.figures[0]
            measured = escape(f"{first.name}: {first}")
            table.add_row(row.key, measured, row.finding.verdict, f"{row.finding.seconds:.0f}")
    console.print(table)
    counts = ", ".join(f"{count} {name}" for name, count in report.verdicts().items())
    console.print(f"{counts}; {report.seconds / 60:.1f} minutes.")
