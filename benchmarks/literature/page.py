"""What came of the claims as one self-contained page: first where each stands, then each by itself.

The first picture has a row for each claim: what was measured over what was promised, with its
interval. A claim with a picture shows it below; the words of all of them come last.
"""

import time
from html import escape
from typing import Any

from headway.measure.onepage import Plot, one_page
from literature.claim import HOLDS, IN_PART, NOT_HERE
from literature.table import Report, Row

COLOURS = {HOLDS: "#30a46c", IN_PART: "#f5a524", NOT_HERE: "#e5484d"}
SILENT = "#8b8d98"
LEAST, MOST = 0.05, 20.0
"""Ratios beyond are drawn at the edge."""
PROMISED = {
    **{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1},
    "line": {"dash": "dash", "color": SILENT},
}
STYLE = """<style>
#plot0 { height: 46rem }
.claim { border: 1px solid var(--line); border-left-width: 5px; border-radius: 6px;
  padding: .5rem .8rem; margin: .6rem 0; overflow-wrap: anywhere }
.claim b { color: var(--text) } .claim ul { margin: .3rem 0; padding-left: 1.2rem }
.claim .verdict { font-weight: 600 }
</style>"""


def html(report: Report) -> str:
    """The page."""
    counts = ", ".join(f"{count} {name}" for name, count in report.verdicts().items())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.at))
    before = [
        STYLE,
        f"<p>{escape(report.asked)} on {escape(report.machine)}, {when}, "
        f"{report.seconds / 60:.1f} minutes, Headway {escape(report.version)}.</p>",
        f"<p>{escape(counts)}.</p>",
    ]
    pictures = [
        (row.says, said(row), row.finding.picture)
        for row in report.rows
        if row.finding is not None and row.finding.picture is not None
    ]
    return one_page(
        f"{report.asked} · python benchmarks/claims_page.py",
        "What serving literature promises, measured here",
        before,
        [standing(report), *pictures],
        ["<h2>Every claim in words</h2>", *map(card, report.rows)],
    )


def said(row: Row) -> str:
    """Verdict and reason."""
    assert row.finding is not None
    return f"{row.finding.verdict}: {row.finding.figures[0]}. {row.finding.why}"


def standing(report: Report) -> Plot:
    """Measured over promised, a row a claim, a colour a verdict."""
    rows = [row for row in reversed(report.rows) if row.finding is not None]
    layout = {
        "xaxis": {"title": {"text": "measured over promised"}, "type": "log"},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": [row.key for row in rows],
            "automargin": True,
        },
        "shapes": [PROMISED],
    }
    said = "The dashed line is the promise; bars are 95%. Touch a point to read its claim."
    data = [series(rows, verdict, colour) for verdict, colour in COLOURS.items()]
    return "Where each claim stands", said, {"data": data, "layout": layout}


def series(rows: list[Row], verdict: str, colour: str) -> dict[str, Any]:
    """The claims of one verdict, with their intervals."""
    mine = [row for row in rows if row.finding and row.finding.verdict == verdict]
    ends = [ratios(row) for row in mine]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict,
        "marker": {"color": colour, "size": 11},
        "x": [round(middle, 4) for _, middle, _ in ends],
        "y": [row.key for row in mine],
        "text": [row.says for row in mine],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round(high - middle, 4) for _, middle, high in ends],
            "arrayminus": [round(middle - low, 4) for low, middle, _ in ends],
            "color": colour,
        },
    }


def ratios(row: Row) -> tuple[float, float, float]:
    """(low, middle, high) of the headline over what was promised, within what is drawn."""
    assert row.finding is not None
    figure, promised = row.finding.figures[0], row.finding.promise.low

    def over(value: float) -> float:
        return min(max(value / promised, LEAST), MOST)

    middle = over(figure.value)
    low = middle if figure.low is None else over(figure.low)
    high = middle if figure.high is None else over(figure.high)
    return low, middle, high


def card(row: Row) -> str:
    """One claim in words."""
    finding = row.finding
    colour = COLOURS[finding.verdict] if finding else SILENT
    parts = [f"<b>{escape(row.says)}</b> <code>{escape(row.key)}</code>"]
    parts.append(f"<p>{escape(row.family)} · {escape(row.source)}. {escape(row.how)}</p>")
    if finding is None:
        parts.append(f"<p>not measured: {escape(row.missing)}</p>")
    else:
        figures = "".join(
            f"<li>{escape(f.name)}: <b>{escape(str(f))}</b></li>" for f in finding.figures
        )
        verdict = f'<span class="verdict" style="color:{colour}">{finding.verdict}</span>'
        parts.append(f"<ul>{figures}</ul><p>{verdict}: {escape(finding.why)}</p>")
    return f'<div class="claim" style="border-left-color:{colour}">{"".join(parts)}</div>'
