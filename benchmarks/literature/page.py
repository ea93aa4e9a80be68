"""What came of the claims as one self-contained page: first where each stands, then each by itself.

The first picture has a row for each claim: what was measured over what was promised, with its
interval. A claim with a picture shows it below; the words of all of them come last.
"""

import time
from dataclasses import replace
from html import escape

from headway.measure.onepage import one_page, section
from headway.measure.plot import BAD, GOOD, SILENT, WARN, Plot, Series
from literature.claim import HOLDS, IN_PART, NOT_HERE
from literature.table import Report, Row

COLOURS = {HOLDS: GOOD, IN_PART: WARN, NOT_HERE: BAD}
LEAST, MOST = 0.05, 20.0
"""Ratios beyond are drawn at the edge."""
STYLE = """<style>
.claim { border-left: 5px solid var(--key) } .claim ul { margin: .3rem 0; padding-left: 1.2rem }
.claim .verdict { font-weight: 600; color: var(--key) }
</style>"""


def html(report: Report) -> str:
    """The page."""
    counts = ", ".join(f"{count} {name}" for name, count in report.verdicts().items())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.at))
    pictures = [
        replace(row.finding.picture, title=row.says, caption=format_verdict(row))
        for row in report.rows
        if row.finding is not None and row.finding.picture is not None
    ]
    return one_page(
        f"{report.asked} · python benchmarks/claims_page.py",
        f"What serving literature promises, measured here: {counts}",
        f"{report.asked} on {report.machine}, {when}, {report.seconds / 60:.1f} minutes, "
        f"Headway {report.version}",
        [standing(report), *pictures],
        [STYLE, section("Every claim in words", ""), *map(card, report.rows)],
    )


def format_verdict(row: Row) -> str:
    """Verdict and reason."""
    assert row.finding is not None
    return f"{row.finding.verdict}: {row.finding.figures[0]}. {row.finding.why}"


def standing(report: Report) -> Plot:
    """Measured over promised, a row a claim, a colour a verdict."""
    rows = [row for row in report.rows if row.finding is not None]
    return Plot(
        title="Where each claim stands",
        caption="The dashed line is the promise; bars are 95%. Touch a point to read its claim.",
        x="measured over promised",
        y="",
        log_x=True,
        verticals=[1.0],
        series=[series(rows, verdict, colour) for verdict, colour in COLOURS.items()],
    )


def series(rows: list[Row], verdict: str, colour: str) -> Series:
    """The claims of one verdict, with their intervals."""
    mine = [row for row in rows if row.finding and row.finding.verdict == verdict]
    ends = [ratios(row) for row in mine]
    return Series(
        kind="points",
        name=verdict,
        colour=colour,
        x=[middle for _, middle, _ in ends],
        y=[row.key for row in mine],
        low=[low for low, _, _ in ends],
        high=[high for _, _, high in ends],
        notes=[row.says for row in mine],
    )


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
        verdict = f'<span class="verdict">{finding.verdict}</span>'
        parts.append(f"<ul>{figures}</ul><p>{verdict}: {escape(finding.why)}</p>")
    return f'<section class="claim c-{colour}">{"".join(parts)}</section>'
