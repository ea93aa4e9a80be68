"""Print an evaluation in the terminal: shares with their intervals, then A against B and the gate.

The HTML page prints the same tables.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from headway.evals.pairs import (
    AS_GOOD,
    CANNOT_TELL,
    NATS,
    PERPLEXITY,
    RELATIVE,
    UNCLEAR,
    WORSE,
    EvalComparison,
    Measure,
)
from headway.evals.questions import Share, SkillsReport
from headway.evals.report import EvalReport
from headway.evals.texts import SHARE, TextFigure

PLURALS = {"skill": "skills", "task": "tasks", "text": "figures of text"}
STYLES = {WORSE: "bold red", AS_GOOD: "green", UNCLEAR: "yellow", CANNOT_TELL: "dim"}


def show(report: EvalReport, console: Console, gate: bool = False) -> None:
    """Print the whole report."""
    console.print(f"[bold]{heading(report)}[/]", highlight=False)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    if report.skills is not None:
        console.print(skills_table(report.skills))
        for line in skills_notes(report.skills):
            console.print(line, highlight=False)
    if report.tasks is not None:
        console.print(tasks_table(report.tasks))
    if report.text is not None:
        console.print(figures_table("text", report.text.figures))
    if report.divergence is not None:
        title = f"B against A ({report.divergence.method})"
        console.print(figures_table(title, report.divergence.figures))
    if report.comparison is not None:
        console.print(comparison_table(report.comparison))
        for line in comparison_lines(report.comparison, gate):
            console.print(line, highlight=False)


def heading(report: EvalReport) -> str:
    """Return one line that names the model and the run."""
    return f"{report.model} at {report.place} · {report.seconds:.0f} s · headway {report.headway}"


def plain_table(*columns: str) -> Table:
    """Return a table without a frame; the first column is left-aligned."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def skills_table(report: SkillsReport) -> Table:
    """Return the table of right answers, skills × levels, with 95% intervals."""
    levels = sorted({share.level for share in report.shares if share.level})
    columns = [f"level {level}" for level in levels]
    table = plain_table("right answers", *columns, "all", "of")
    names = list(dict.fromkeys(share.skill for share in report.shares))
    for name in (*names[1:], ""):
        cells = [report.find(name, level) for level in (*levels, 0)]
        total = cells[-1].total if cells[-1] else 0
        style = "bold" if not name else ""
        table.add_row(name or "all", *map(share_text, cells), f"{total:,}", style=style)
    return table


def tasks_table(report: SkillsReport) -> Table:
    """Return the table of right answers per task, with 95% intervals."""
    table = plain_table("tasks", "right", "of")
    for share in report.shares:
        if share.skill and share.level:
            table.add_row(share.skill, share_text(share), f"{share.total:,}")
    return table


def share_text(share: Share | None) -> str:
    """Format a share as "96.0% (86.5…98.9)", or "–" if no question was asked."""
    if share is None or not share.total:
        return "–"
    return f"{share.share:.1%} ({share.low * 100:.1f}…{share.high * 100:.1f})"


def skills_notes(report: SkillsReport) -> Iterator[str]:
    """Yield lines that explain the shares."""
    yield f"Seed {report.seed}; in brackets Wilson's 95% interval of the share, in percent."
    if report.unfit:
        yield f"{report.unfit} questions did not fit into the context and count as wrong."


def figures_table(title: str, figures: Sequence[TextFigure]) -> Table:
    """Return a table of figures with their 95% intervals."""
    table = plain_table(title, "", "95%", "passages")
    for each in figures:
        percent = each.unit == SHARE
        value, low, high = (
            f"{x:.1%}" if percent else f"{x:.4f}" for x in (each.value, each.low, each.high)
        )
        unit = "" if percent else f" {each.unit}"
        table.add_row(each.name, value + unit, f"{low} … {high}", f"{each.items:,}")
    return table


def comparison_table(comparison: EvalComparison) -> Table:
    """Return the comparison, one row per measure."""
    names = (f"A {comparison.first}", f"B {comparison.second}")
    table = plain_table(
        *("required *", *names, "loss of B", "95%", "tolerance", "lost, gained", "p", "items"),
        "B is",
    )
    for each in comparison.measures:
        counts = "–" if each.only_first is None else f"{each.only_first}, {each.only_second}"
        table.add_row(
            f"{each.name} *" if each.required else each.name,
            value_text(each, each.first),
            value_text(each, each.second),
            loss_text(each, each.loss),
            f"{loss_text(each, each.low)} … {loss_text(each, each.high)}",
            loss_text(each, each.tolerance).removeprefix("+"),
            counts,
            "–" if each.p is None else f"{each.p:.2g}",
            f"{each.items:,}",
            f"[{STYLES[each.verdict]}]{each.verdict}[/]",
        )
    return table


def value_text(measure: Measure, value: float | None) -> str:
    """Format a share in percent, bits with four digits, perplexity with two."""
    if value is None:
        return "–"
    if measure.kind == PERPLEXITY:
        return f"{value:.2f}"
    return f"{value:.4f}" if measure.kind in (RELATIVE, NATS) else f"{value:.1%}"


def loss_text(measure: Measure, loss: float) -> str:
    """Format a loss: points of a share, percent of bits or perplexity, or nats."""
    if measure.kind == NATS:
        return f"{loss:.4f}"
    percent = measure.kind in (RELATIVE, PERPLEXITY)
    return f"{loss * 100:+.1f}%" if percent else f"{loss * 100:+.1f}"


def comparison_lines(comparison: EvalComparison, gate: bool) -> Iterator[str]:
    """Yield the differing settings, how to read the table, and the gate's verdict."""
    for line in comparison.differences:
        yield f"[bold yellow]![/] {line}"
    yield (
        "A loss is positive where B is worse: points of a share, % of bits per byte or perplexity, "
        "or nats per token; p is exact McNemar's, of the skills corrected by Holm."
    )
    verdict = gate_text(comparison)
    if gate:
        yield f"[bold {'red' if comparison.failed else 'green'}]gate: {verdict}[/]"
    else:
        yield f"with --gate: {verdict}"


def gate_text(comparison: EvalComparison) -> str:
    """Return whether the gate fails or passes, and why."""
    if comparison.worse:
        return "fails: " + "; ".join(
            f"{each.name} lost more than {loss_text(each, each.floor)} "
            f"(tolerance {loss_text(each, each.tolerance)})"
            for each in comparison.worse
        )
    if comparison.blind:
        reason = "no required measure has the items to see the tolerated loss"
        return (
            f"passes, for --allow-unclear was given: {reason}"
            if comparison.allow_unclear
            else (f"fails: {reason}; ask more, or give --allow-unclear")
        )
    return f"passes: {'; '.join(format_groups(comparison.measures))}"


def format_groups(measures: Sequence[Measure]) -> Iterator[str]:
    """Yield a clause for each kind of measure with the same verdict: "12 skills: no difference that
    10 questions each could show; text: passes"."""
    groups: dict[tuple[str, str], list[Measure]] = {}
    by_skill = any(each.name.startswith("skill ") for each in measures)
    for each in measures:
        if each.name != "skills" or not by_skill:
            groups.setdefault((kind_of(each), each.verdict), []).append(each)
    for (kind, verdict), group in groups.items():
        name = group[0].name if len(group) == 1 else f"{len(group)} {PLURALS[kind]}"
        if verdict == AS_GOOD:
            yield f"{'text' if kind == 'text' else name}: as good within the tolerance"
            continue
        items = sorted({each.items for each in group})
        number = f"{items[0]:,}" if len(items) == 1 else f"{items[0]:,} to {items[-1]:,}"
        unit = "passages" if kind == "text" else "questions"
        each_ = " each" if len(group) > 1 else ""
        yield f"{name}: no difference that {number} {unit}{each_} could show"


def kind_of(measure: Measure) -> str:
    """Return what a measure is of: a skill, a task, or text."""
    first = measure.name.split(maxsplit=1)[0].removesuffix("s")
    return first if first in PLURALS else "text"
