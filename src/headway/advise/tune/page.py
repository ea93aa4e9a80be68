"""The tuner's page: TTFT against TPOT of all settings, the Pareto front, and the choice."""

from math import isfinite

from headway.advise.tune.confirm import ConfirmedSetting
from headway.advise.tune.outcome import TuningReport, format_lines, format_yaml
from headway.advise.tune.search import Point, pareto_front
from headway.measure.onepage import one_page, preformatted, section
from headway.measure.plot import BAD, GOOD, SILENT, Plot, Series, bars, line


def html(report: TuningReport) -> str:
    """Return the page as one self-contained file."""
    heading = f"{report.model}: {'tuned' if report.gains else 'nothing to gain'}"
    after = [
        section("The choice", preformatted("\n".join(format_lines(report)))),
        section("Options", preformatted(format_yaml(report))),
    ]
    return one_page(
        f"{report.model} · headway tune", heading, report.why, plots(report), after,
        tone="good" if report.gains else "",
    )  # fmt: skip


def plots(report: TuningReport) -> list[Plot]:
    """Return the two plots: TTFT against TPOT, and goodput by setting."""
    return [dial(report), goodput(report)]


def dial(report: TuningReport) -> Plot:
    """Return every finalist at its TTFT and TPOT."""
    finite = [p for p in report.points if isfinite(p.ttft_s) and isfinite(p.tpot_s)]
    front = list(pareto_front(finite))
    series = [
        spots("simulated", finite, SILENT),
        line("front", [1e3 * p.ttft_s for p in front], [1e3 * p.tpot_s for p in front]),
        spots("default", [p for p in finite if not p.changes], BAD),
        spots("chosen", [p for p in finite if p.changes == report.chosen], GOOD),
        real_spots([c for c in report.confirmed if c.ttft_s is not None]),
    ]
    return Plot(
        title="The dial: first tokens against later ones",
        caption=f"Medians; --prefer {report.prefer}. On the front nothing is better in both.",
        x="TTFT p50, ms",
        y="TPOT p50, ms",
        series=series,
    )


def real_spots(known: list[ConfirmedSetting]) -> Series:
    """Return the settings that ran on a real server."""
    return Series(
        kind="points",
        name="real",
        x=[1e3 * (c.ttft_s or 0) for c in known],
        y=[1e3 * (c.tpot_s or 0) for c in known],
        notes=[c.name for c in known],
    )


def spots(name: str, points: list[Point], colour: str) -> Series:
    """Return points of the dial, each with its setting."""
    return Series(
        kind="points",
        name=name,
        colour=colour,
        x=[1e3 * p.ttft_s for p in points],
        y=[1e3 * p.tpot_s for p in points],
        notes=[p.name for p in points],
    )


def goodput(report: TuningReport) -> Plot:
    """Return the finalists' goodput, real beside simulated."""
    points = sorted(report.points, key=lambda p: -p.goodput)
    real = {c.changes: c for c in report.confirmed if c.runs and not c.died}
    both = [p for p in points if p.changes in real]
    return Plot(
        title="Goodput",
        caption="The last rung's settings; real ones in turns.",
        x="setting",
        y="requests/s in SLO",
        series=[
            bars("simulated, worst case", [p.name for p in points], [p.goodput for p in points]),
            bars("real", [p.name for p in both], [real[p.changes].goodput for p in both]),
        ],
    )
