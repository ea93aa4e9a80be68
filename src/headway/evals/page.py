"""Render an evaluation as one HTML page: the terminal's tables, plots, and examples of wrong
answers.

The page needs no network: styles, scripts and data are inside it.
"""

import io
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

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
from headway.evals.table import heading, show
from headway.evals.texts import BITS, SHARE, TextFigure
from headway.measure.onepage import Plot, axes, one_page, preformatted

MAX_WRONG_ANSWERS = 3
"""Wrong answers shown for each skill and level; the JSON report has all of them."""
MAX_TEXT_CHARS = 600
"""Characters of a question, and of a reply, that the page shows."""
COLOURS = {WORSE: "#e5484d", AS_GOOD: "#30a46c", UNCLEAR: "#f5a524", CANNOT_TELL: "#8b8d98"}


def html(report: EvalReport, gate: bool = False) -> str:
    """Return the whole page; with `gate`, the verdict of the gate is on it."""
    return one_page(
        f"{report.model} · headway eval",
        heading(report),
        [preformatted(as_text(report, gate))],
        list(all_plots(report)),
        [wrong_answers(report)],
    )


def as_text(report: EvalReport, gate: bool) -> str:
    """Return the terminal's output without colours."""
    written = io.StringIO()
    show(report, Console(file=written, width=150, no_color=True), gate)
    return written.getvalue()


def all_plots(report: EvalReport) -> Iterator[Plot]:
    """Yield (title, one sentence, plotly figure) of each plot that has data."""
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
    """Return the plot of B's loss in each measure, with the tolerance as a dotted line."""
    shown = [each for each in comparison.measures if each.kind != NATS]
    layout = axes("loss of B, points of a share or % of bits", "")
    layout["yaxis"] = {"autorange": "reversed", "automargin": True}
    layout["shapes"] = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1,
         "line": {"dash": "dot", "width": 1, "color": "gray"}}
        for x in sorted({0.0, *(100 * each.tolerance for each in shown)})
    ]  # fmt: skip
    data = [
        loss_points(verdict, [each for each in shown if each.verdict == verdict])
        for verdict in COLOURS
    ]
    caption = (
        f"B is {comparison.second}, A is {comparison.first}. Dots right of 0 are losses, bars hold "
        "95%, the dotted line is the tolerance."
    )
    return "B against A", caption, {"data": [each for each in data if each["x"]], "layout": layout}


def loss_points(verdict: str, measures: Sequence[Measure]) -> dict[str, Any]:
    """Return the points of all measures with the same verdict."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict,
        "marker": {"color": COLOURS[verdict], "size": 9},
        "x": [100 * each.loss for each in measures],
        "y": [each.name for each in measures],
        "error_x": error_bars(
            [(100 * each.loss, 100 * each.low, 100 * each.high) for each in measures]
        ),
    }


def skills_plot(reports: Sequence[EvalReport], level: int) -> Plot:
    """Return the plot of right answers of each skill at one level, one colour per model."""
    data = []
    for report in reports:
        shares = report.skills.shares if report.skills is not None else []
        cells = [share for share in shares if share.level == level and share.total]
        data.append(
            bars(
                report.model,
                [share.skill or "all" for share in cells],
                [bounds_of(share) for share in shares],
            )
        )
    layout = axes("", "% right") | {"barmode": "group"}
    layout["yaxis"] |= {"range": [0, 105]}
    caption = "Bars hold Wilson's 95% interval."
    return f"Skills at level {level}", caption, {"data": data, "layout": layout}


def bounds_of(share: Share) -> tuple[float, float, float]:
    """Return a share with its 95% interval, all in percent."""
    return 100 * share.share, 100 * share.low, 100 * share.high


def text_plot(reports: Sequence[EvalReport], unit: str, caption: str) -> Plot:
    """Return the plot of all figures with one unit, one colour per model."""
    data = []
    for report in reports:
        figures: list[TextFigure] = report.text.figures if report.text is not None else []
        mine = [each for each in figures if each.unit == unit]
        data.append(
            bars(
                report.model,
                [each.name for each in mine],
                [(each.value, each.low, each.high) for each in mine],
            )
        )
    layout = axes("", unit) | {"barmode": "group"}
    return unit[:1].upper() + unit[1:], caption, {"data": data, "layout": layout}


def bars(
    name: str, labels: Sequence[str], values: Sequence[tuple[float, float, float]]
) -> dict[str, Any]:
    """Return a bar series with its intervals."""
    return {
        "type": "bar",
        "name": name,
        "x": list(labels),
        "y": [value for value, _, _ in values],
        "error_y": error_bars(values),
    }


def error_bars(values: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return plotly's error bars for (value, low, high) triples."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(high - value, 0.0) for value, _, high in values],
        "arrayminus": [max(value - low, 0.0) for value, low, _ in values],
        "thickness": 1,
    }


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
    return "<h2>Wrong answers</h2>" + "".join(sections) if sections else ""


def format_item(item: Item) -> str:
    """Return the end of the question, the right answer and the reply."""
    question = "\n".join(f"{message['role']}: {message['content']}" for message in item.prompt)
    start = max(0, len(question) - MAX_TEXT_CHARS)
    reply = "(the chat exceeds the context)" if item.reply is None else item.reply[:MAX_TEXT_CHARS]
    return f"{'…' if start else ''}{question[start:]}\n  wanted  {item.answer}\n  reply   {reply}\n"
