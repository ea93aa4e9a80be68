"""The tuner's page: TTFT against TPOT of all settings, the Pareto front, and the choice."""

from typing import Any

from headway.advise.tune.outcome import TuningReport, format_lines, format_yaml
from headway.advise.tune.search import Point, pareto_front
from headway.measure.onepage import Plot, axes, one_page, preformatted


def html(report: TuningReport) -> str:
    """Return the page as one self-contained file."""
    heading = f"{report.model}: {'tuned' if report.gains else 'nothing to gain'}"
    after = [preformatted("\n".join(format_lines(report))), preformatted(format_yaml(report))]
    return one_page(f"{report.model} · headway tune", heading, [], plots(report), after)


def plots(report: TuningReport) -> list[Plot]:
    """Return the two plots: TTFT against TPOT, and goodput by setting."""
    return [dial(report), goodput(report)]


def dial(report: TuningReport) -> Plot:
    """Return every finalist at its TTFT and TPOT."""
    finite = [p for p in report.points if p.ttft_s < float("inf") and p.tpot_s < float("inf")]
    edge = list(pareto_front(finite))
    data: list[dict[str, Any]] = [
        spots(finite, "simulated", {"size": 8, "opacity": 0.5}),
        {**spots(edge, "front", {"size": 8}), "mode": "lines+markers"},
        spots([p for p in finite if not p.changes], "default", {"size": 13, "symbol": "square"}),
        spots(
            [p for p in finite if p.changes == report.chosen],
            "chosen",
            {"size": 15, "symbol": "star"},
        ),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "real",
            "marker": {"size": 11, "symbol": "diamond-open"},
            "x": [1e3 * c.ttft_s for c in report.confirmed if c.ttft_s is not None],
            "y": [1e3 * (c.tpot_s or 0) for c in report.confirmed if c.ttft_s is not None],
            "text": [c.name for c in report.confirmed if c.ttft_s is not None],
        },
    ]
    caption = f"Medians; --prefer {report.prefer}. On the front nothing is better in both."
    layout = axes("TTFT p50, ms", "TPOT p50, ms")
    return "The dial: first tokens against later ones", caption, {"data": data, "layout": layout}


def spots(points: list[Point], name: str, marker: dict[str, Any]) -> dict[str, Any]:
    """Return points of the dial, each with its setting."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": marker,
        "x": [round(1e3 * p.ttft_s, 4) for p in points],
        "y": [round(1e3 * p.tpot_s, 4) for p in points],
        "text": [p.name for p in points],
    }


def goodput(report: TuningReport) -> Plot:
    """Return the finalists' goodput, real beside simulated."""
    points = sorted(report.points, key=lambda p: -p.goodput)
    real = {c.changes: c for c in report.confirmed if c.runs and not c.died}
    both = [p for p in points if p.changes in real]
    data = [
        bars([p.name for p in points], [p.goodput for p in points], "simulated, worst case"),
        bars([p.name for p in both], [real[p.changes].goodput for p in both], "real"),
    ]
    layout = axes("setting", "requests/s in SLO")
    return (
        "Goodput",
        "The last rung's settings; real ones in turns.",
        {"data": data, "layout": layout},
    )


def bars(names: list[str], values: list[float], name: str) -> dict[str, Any]:
    """Return bars by setting."""
    return {"type": "bar", "name": name, "x": names, "y": [round(v, 4) for v in values]}
