"""All claims that `claims_page.py` asks, in the order of the page, and the run over them."""

import io
import time
from collections.abc import Sequence

import msgspec

import headway
from headway.core.errors import HeadwayError, UsageError
from headway.core.machine import processor_name
from literature import (
    arithmetic,
    batching,
    bottlenecks,
    caching,
    cost,
    fleet,
    load,
    memory,
    speculation,
)
from literature.claim import Claim, Finding, NotThereError
from literature.subject import Subject

FAMILIES = (
    "Batching",
    "Prompt caching",
    "AdaptiveSpeculator",
    "KV",
    "Bottlenecks",
    "Quantization",
    "Fleet",
    "Cost",
)
MODULES = (
    *(batching, load, caching, speculation, arithmetic, memory, bottlenecks),
    *(fleet, cost),
)
CLAIMS: tuple[Claim, ...] = tuple(
    sorted(
        (claim for module in MODULES for claim in module.CLAIMS),
        key=lambda claim: FAMILIES.index(claim.family),
    )
)
NOT_ASKED = "not asked of a server: it needs a folder"


class Row(msgspec.Struct, kw_only=True):
    """A claim and what came of it; `missing` says why nothing did."""

    key: str
    family: str
    says: str
    source: str
    how: str
    finding: Finding | None = None
    missing: str = ""


class Report(msgspec.Struct, kw_only=True):
    """One run of `claims_page.py`."""

    format: str = "headway-claims"
    version: str = headway.__version__
    asked: str
    """The folder's name or the URL."""
    machine: str
    at: float
    """Seconds since 1970."""
    seconds: float = 0.0
    rows: list[Row] = []

    def verdicts(self) -> dict[str, int]:
        """How many claims came to each verdict, those without one last."""
        found: dict[str, int] = {}
        for row in self.rows:
            name = row.finding.verdict if row.finding else "not measured"
            found[name] = found.get(name, 0) + 1
        return found


def chosen(names: Sequence[str]) -> list[Claim]:
    """The claims of these keys and families, all without any; UsageError for one there is not."""
    known = {claim.key for claim in CLAIMS} | {slug(family) for family in FAMILIES}
    for name in names:
        if slug(name) not in known:
            raise UsageError(
                f"--only: there is no claim and no family {name!r}.",
                f"There are: {', '.join([*map(slug, FAMILIES), *(c.key for c in CLAIMS)])}.",
            )
    wanted = {slug(name) for name in names}
    return [c for c in CLAIMS if not names or {c.key, slug(c.family)} & wanted]


def slug(name: str) -> str:
    """Prompt caching → prompt-caching"""
    return name.strip().lower().replace(" ", "-")


def empty(subject: Subject) -> Report:
    """A report of nothing yet."""
    return Report(
        asked=subject.url or (subject.folder.name if subject.folder else ""),
        machine=processor_name(),
        at=time.time(),
    )


def run(subject: Subject, claims: Sequence[Claim], report: Report | None = None) -> Report:
    """Measure every claim that the subject allows; one that cannot be measured says why.

    What is known is in `report` after each of them.
    """
    report = empty(subject) if report is None else report
    began_s = time.monotonic()
    for number, claim in enumerate(claims, 1):
        subject.watch(f"[{number}/{len(claims)}] {claim.says}")
        report.rows.append(measured(subject, claim))
        report.seconds = round(time.monotonic() - began_s, 1)
    return report


def measured(subject: Subject, claim: Claim) -> Row:
    """One claim's row."""
    row = Row(
        key=claim.key, family=claim.family, says=claim.says, source=claim.source, how=claim.how
    )
    if subject.folder is None and claim.needs == "folder":
        row.missing = NOT_ASKED
        return row
    began_s = time.monotonic()
    try:
        row.finding = claim.measure(subject)
        row.finding.seconds = round(time.monotonic() - began_s, 1)
    except (HeadwayError, NotThereError) as error:
        row.missing = error.cause if isinstance(error, HeadwayError) else str(error)
    return row


# ── as text ─────────────────────────────────────────────────────────────────────────────────


def words_of(row: Row) -> str:
    """A claim as a script prints it: claim, source, what was measured, verdict and why."""
    text = io.StringIO()
    print(f"{row.key}: {row.says}\n  source: {row.source}\n  how: {row.how}", file=text)
    if row.finding is None:
        print(f"  not measured: {row.missing}", file=text)
        return text.getvalue()
    for figure in row.finding.figures:
        print(f"  {figure.name}: {figure}", file=text)
    print(f"  {row.finding.verdict}: {row.finding.why}", file=text)
    print(f"  ({row.finding.seconds:.1f} s)", file=text)
    return text.getvalue()


def markdown(report: Report) -> str:
    """The table of docs/claims.md."""
    lines = ["| claim | source | measured here | verdict | |", "| --- | --- | --- | --- | --- |"]
    for row in report.rows:
        if row.finding is None:
            cells = [row.says, row.source, "", "not measured", row.missing]
        else:
            told = "; ".join(f"{figure.name} {figure}" for figure in row.finding.figures[:4])
            cells = [row.says, row.source, told, row.finding.verdict, row.finding.why]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)
