"""The planner's page: capacity curves, the fleet, and the table, in one file."""

import io

from rich.console import Console

from headway.advise.plan.answer import PlanAnswer, format_degrees, show_plan
from headway.advise.plan.capacity import MachineRow
from headway.measure.onepage import one_page, preformatted, section
from headway.measure.plot import PALETTE, Plot, Series, bars

CASES = ("as it is", "slower", "faster")
"""Of `MachineRow.curves`; of a roofline: its middle, its best and its worst end."""


def html(answer: PlanAnswer) -> str:
    """Return the page as one self-contained file."""
    return one_page(
        f"{answer.model} · headway plan",
        answer.best,
        f"{answer.model} · headway plan",
        [capacity_plot(answer), fleet_plot(answer)],
        [section("All figures", preformatted(as_text(answer)))],
    )


def as_text(answer: PlanAnswer) -> str:
    """Return what the terminal shows, without colours."""
    written = io.StringIO()
    show_plan(answer, Console(file=written, width=200, no_color=True))
    return written.getvalue()


def row_label(row: MachineRow) -> str:
    return f"{row.machine}{format_degrees(row)}" + (
        f", {row.weights}" if row.weights != "none" else ""
    )


def capacity_plot(answer: PlanAnswer) -> Plot:
    """Return the share in SLO by load, a colour for each machine, dotted where it is slower or
    faster."""
    load = "requests at once" if answer.at_once is not None else "requests/s"
    return Plot(
        title="What one server holds",
        caption=f"Simulated; the line is the attainment asked for, {answer.attainment:.0%}.",
        x=f"{load} of one server",
        y="% in their objectives",
        horizontals=[100 * answer.attainment],
        series=[
            Series(
                kind="both",
                name=f"{row_label(row)}, {case}",
                colour=number % PALETTE,
                dashed=case != CASES[0],
                x=[load for load, _ in curve],
                y=[100 * share for _, share in curve],
            )
            for number, row in enumerate(answer.rows)
            for case, curve in zip(CASES, row.curves, strict=False)
        ],
    )


def fleet_plot(answer: PlanAnswer) -> Plot:
    """Return the number of servers by machine, and their cost an hour where a price is known."""
    rows = [(row_label(row), row) for row in answer.rows if row.servers is not None]
    prices = "; ".join(
        f"{name}: ${row.usd_per_hour:.2f} an hour"
        for name, row in rows
        if row.usd_per_hour is not None
    )
    return Plot(
        title="The fleet",
        caption=f"The fewest whose worst drawn case keeps the attainment. {prices}".strip(),
        x="machine",
        y="servers",
        series=[bars("servers", [n for n, _ in rows], [float(r.servers or 0) for _, r in rows])],
    )
