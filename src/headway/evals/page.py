"""Render an evaluation as one HTML page: the verdict, plots, the terminal's tables, and examples of
wrong answers.
"""

import io
from collections.abc import Iterator, Sequence
from html import escape

from rich.console import Console

from headway.evals.pairs import (
    AS_GOOD,
    CANNOT_TELL,
    NATS,
    UNCLEAR,
    WORSE,
    EvalComparison,
    Measure,
)
from headway.evals.questions import Item, Share
from headway.evals.report import EvalReport
from headway.evals.table import gate_text, heading, share_text, show
from headway.evals.texts import BITS, SHARE, TextFigure
from headway.measure.onepage import one_page, preformatted, section
from headway.measure.plot import BAD, GOOD, SILENT, WARN, Plot, Series

MAX_WRONG_ANSWERS = 3
"""Wrong answers shown for each skill and level; the JSON report has all of them."""
MAX_TEXT_CHARS = 600
"""Characters of a question, and of a reply, that the page shows."""
COLOURS = {WORSE: BAD, AS_GOOD: GOOD, UNCLEAR: WARN, CANNOT_TELL: SILENT}


def html(report: EvalReport, gate: bool = False) -> str:
    """Return the whole page; with `gate`, the verdict of the gate is on it."""
    failed = report.comparison is not None and report.comparison.failed
    return one_page(
        f"{report.model} · headway eval",
        headline(report),
        heading(report),
        list(all_plots(report)),
        [section("All figures", preformatted(as_text(report, gate))), wrong_answers(report)],
        tone="" if report.comparison is None else "bad" if failed else "good",
    )


def headline(report: EvalReport) -> str:
    """Return the answer: the gate's verdict of a comparison, else what the model reaches."""
    if report.comparison is not None:
        return f"{report.comparison.second} {gate_text(report.comparison)}"
    parts = []
    for what, questions in (("skills", report.skills), ("tasks", report.tasks)):
        whole = questions.find("", 0) if questions is not None else None
        if whole is not None and whole.total:
            parts.append(f"{share_text(whole)} of {whole.total:,} {what} right")
    if report.text is not None and report.text.figures:
        first = report.text.figures[0]
        parts.append(f"{first.value:.4g} {first.unit} ({first.name})")
    return "; ".join(parts) or "Nothing was measured"


def as_text(report: EvalReport, gate: bool) -> str:
    """Return the terminal's output without colours."""
    written = io.StringIO()
    show(report, Console(file=written, width=150, no_color=True), gate)
    return written.getvalue()


def all_plots(report: EvalReport) -> Iterator[Plot]:
    """Yield the plots that have data."""
    if report.comparison is not None:
        yield losses(report.comparison)
    both = [each for each in (report.against, report) if each is not None]
    if report.skills is not None:
        levels = sorted({share.level for share in report.skills.shares if share.level})
        for level in levels:
            yield skills_plot(both, level)
    if report.text is not None:
        yield text_plot(both, BITS, "Less is better; 8 is knowing nothing.")
        if report.text.last_words is not None:
            yield text_plot(both, SHARE, "Last words that greedy decoding writes.")


def losses(comparison: EvalComparison) -> Plot:
    """Return the plot of B's loss in each measure, with the tolerances as dashed lines."""
    shown = [each for each in comparison.measures if each.kind != NATS]
    return Plot(
        title="B against A",
        caption=f"B is {comparison.second}, A is {comparison.first}. Dots right of 0 are losses, "
        "bars hold 95%, the dashed lines are 0 and the tolerances.",
        x="loss of B, points of a share or % of bits",
        y="",
        verticals=sorted({0.0, *(100 * each.tolerance for each in shown)}),
        series=[
            loss_points(verdict, [each for each in shown if each.verdict == verdict])
            for verdict in COLOURS
        ],
    )


def loss_points(verdict: str, measures: Sequence[Measure]) -> Series:
    """Return the points of all measures with the same verdict."""
    return Series(
        kind="points",
        name=verdict,
        colour=COLOURS[verdict],
        x=[100 * each.loss for each in measures],
        y=[each.name for each in measures],
        low=[100 * each.low for each in measures],
        high=[100 * each.high for each in measures],
    )


def skills_plot(reports: Sequence[EvalReport], level: int) -> Plot:
    """Return the plot of right answers of each skill at one level, one colour per model."""
    series = []
    for report in reports:
        shares = report.skills.shares if report.skills is not None else []
        cells = [share for share in shares if share.level == level and share.total]
        series.append(
            bars(
                report.model,
                [share.skill or "all" for share in cells],
                [bounds_of(share) for share in cells],
            )
        )
    return Plot(
        title=f"Skills at level {level}",
        caption="Bars hold Wilson's 95% interval.",
        x="",
        y="% right",
        series=series,
    )


def bounds_of(share: Share) -> tuple[float, float, float]:
    """Return a share with its 95% interval, all in percent."""
    return 100 * share.share, 100 * share.low, 100 * share.high


def text_plot(reports: Sequence[EvalReport], unit: str, caption: str) -> Plot:
    """Return the plot of all figures with one unit, one colour per model."""
    series = []
    for report in reports:
        figures: list[TextFigure] = report.text.figures if report.text is not None else []
        mine = [each for each in figures if each.unit == unit]
        series.append(
            bars(
                report.model,
                [each.name for each in mine],
                [(each.value, each.low, each.high) for each in mine],
            )
        )
    title = unit[:1].upper() + unit[1:]
    return Plot(title=title, caption=caption, x="", y=unit, series=series)


def bars(name: str, labels: Sequence[str], values: Sequence[tuple[float, float, float]]) -> Series:
    """Return bars of (value, low, high)."""
    return Series(
        kind="bars",
        name=name,
        x=labels,
        y=[value for value, _, _ in values],
        low=[low for _, low, _ in values],
        high=[high for _, _, high in values],
    )


def wrong_answers(report: EvalReport) -> str:
    """Return a few wrong answers of each skill and level, in collapsed sections."""
    if report.skills is None:
        return ""
    cells: dict[tuple[str, int], list[Item]] = {}
    for item in report.skills.items:
        if not item.right:
            cells.setdefault((item.skill, item.level), []).append(item)
    sections = [
        f"<details><summary>{escape(skill)}, level {level}: {len(items)} wrong</summary>"
        f"{preformatted(chr(10).join(map(format_item, items[:MAX_WRONG_ANSWERS])))}</details>"
        for (skill, level), items in cells.items()
    ]
    return section("Wrong answers", "".join(sections)) if sections else ""


def format_item(item: Item) -> str:
    """Return the end of the question, the right answer and the reply."""
    question = "\n".join(f"{message['role']}: {message['content']}" for message in item.prompt)
    start = max(0, len(question) - MAX_TEXT_CHARS)
    reply = "(the chat exceeds the context)" if item.reply is None else item.reply[:MAX_TEXT_CHARS]
    return f"{'…' if start else ''}{question[start:]}\n  wanted  {item.answer}\n  reply   {reply}\n"
