"""What serving literature promises, measured here: each claim with a verdict, as one page.

python benchmarks/claims_page.py [FOLDER | URL] --out claims.html       # make claims
python benchmarks/claims_page.py --only list
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.cli import main as verbs
from headway.cli.common import engine_arguments, model_folder
from headway.config.options import EngineOptions
from headway.config.options.field import option
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from literature.subject import Subject
    from literature.table import Report

EXAMPLE = "python benchmarks/claims_page.py FOLDER --out claims.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsOptions:
    """Which claims are asked, how often what is timed is repeated, and where it is written."""

    out: str = option("", "Write the page here: one HTML file.", common=True)
    json: str = option("", "Write every figure here, as JSON.", common=True)
    only: list[str] = option(
        [],
        "Only these claims or families: kv-13b, batching; `list` names them all.",
        common=True,
    )
    runs: int = option(9, "How often what is timed is repeated.", low=3, high=1000)
    api_key: str = option("", "Key of the server, where it wants one.", secret=True)


ROW = verbs.Verb(
    group="measure",
    usage="claims [FOLDER | URL]",
    help="Measure what serving literature promises: each claim with a verdict, as one page.",
    tables=(ClaimsOptions, EngineOptions),
    function=f"{__name__}:claims",
    switches=(),
)


def claims(call: "VerbCall") -> int:
    """Ask every claim, show the verdicts, and write what `--out` and `--json` name."""
    if len(call.positionals) > 1:
        raise UsageError("claims takes one folder or one URL.", EXAMPLE)
    import msgspec

    from headway.measure.saved import write
    from literature import page
    from literature.table import CLAIMS, chosen, empty, run

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
    from literature.subject import Subject

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


def main(arguments: list[str]) -> int:
    """Run with the command line's reader of options, help and errors."""
    verbs.VERBS["claims"] = ROW
    try:
        return verbs.main(["claims", *arguments])
    finally:
        del verbs.VERBS["claims"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
