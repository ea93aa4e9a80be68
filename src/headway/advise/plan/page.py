"""The planner's page: capacity curves, the fleet, and the table, in one file."""

import io
from typing import Any

from rich.console import Console

from headway.advise.plan.answer import PlanAnswer, format_degrees, show_plan
from headway.advise.plan.capacity import MachineRow
from headway.measure.onepage import Plot, axes, one_page, preformatted

CASES = ("as it is", "slower", "faster")
"""Of `MachineRow.curves`; of a roofline: its middle, its best and its worst end."""
COLOURS = ("#3d63dd", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6", "#00a2c7")


def html(answer: PlanAnswer) -> str:
    """Return the page as one self-contained file."""
    return one_page(
        f"{answer.model} · headway plan",
        answer.best,
        [preformatted(as_text(answer))],
        [plot for plot in (capacity_plot(answer), fleet_plot(answer)) if plot[2]["data"]],
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
    data: list[dict[str, Any]] = []
    for number, row in enumerate(answer.rows):
        for case, curve in zip(CASES, row.curves, strict=False):
            dash = "solid" if case == CASES[0] else "dot"
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{row_label(row)}, {case}",
                    "line": {"color": COLOURS[number % len(COLOURS)], "dash": dash},
                    "x": [round(load, 4) for load, _ in curve],
                    "y": [round(100 * share, 2) for _, share in curve],
                }
            )
    load = "requests at once" if answer.at_once is not None else "requests/s"
    layout = axes(f"{load} of one server", "% in their objectives")
    layout["shapes"] = [
        {
            **{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"dash": "dash"}},
            **{"y0": 100 * answer.attainment, "y1": 100 * answer.attainment},
        }
    ]
    caption = f"Simulated; the line is the attainment asked for, {answer.attainment:.0%}."
    return "What one server holds", caption, {"data": data, "layout": layout}


def fleet_plot(answer: PlanAnswer) -> Plot:
    """Return the number of servers by machine, and their cost an hour where a price is known."""
    rows = [row for row in answer.rows if row.servers is not None]
    names = [row_label(row) for row in rows]
    data: list[dict[str, Any]] = []
    if rows:
        data.append({"type": "bar", "name": "servers", "x": names, "y": [r.servers for r in rows]})
    layout = axes("machine", "servers")
    caption = "The fewest whose worst drawn case keeps the attainment."
    prices = [row.usd_per_hour for row in rows]
    if any(price is not None for price in prices):
        caption += " " + "; ".join(
            f"{n}: ${price:.2f} an hour" for n, price in zip(names, prices) if price is not None
        )
    return "The fleet", caption, {"data": data, "layout": layout}
