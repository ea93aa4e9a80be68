"""The report of a load test as one HTML page: the terminal's text, and a plot of each series."""

import io
from typing import Any

import numpy as np
from rich.console import Console

from headway.bench.latency import Latency, latency
from headway.bench.report import BenchReport
from headway.bench.table import heading, show_report
from headway.measure.onepage import Plot, axes, line, one_page, preformatted, right
from headway.measure.record import Exchange

MAX_POINTS = 4000
SHARES = np.concatenate([np.linspace(0, 99, 100), np.linspace(99.1, 100, 10)])


def html(report: BenchReport) -> str:
    """Return the page."""
    title = f"{report.run.server.model} · headway bench"
    return one_page(title, heading(report), [preformatted(as_text(report))], all_plots(report))


def as_text(report: BenchReport) -> str:
    """Return what the terminal shows, without colours."""
    written = io.StringIO()
    show_report(report, Console(file=written, width=150, no_color=True))
    return written.getvalue()


def all_plots(report: BenchReport) -> list[Plot]:
    """Return (title, a sentence, figure) of each plot that has data."""
    timed = [(x, latency(x)) for x in report.run.exchanges]
    plots = [
        ttft_over_time(report, timed),
        load_over_time(report),
        latencies(report, timed),
        lengths(report, timed),
    ]
    if report.goodput_search is not None:
        plots.insert(0, goodput_curve(report))
    return plots


def ttft_over_time(report: BenchReport, timed: list[tuple[Exchange, Latency | None]]) -> Plot:
    """Return each request at its scheduled time, a colour for each class, failures as crosses."""
    data: list[dict[str, Any]] = []
    step = max(1, len(timed) // MAX_POINTS)
    for name in report.classes:
        mine = [(x, t) for x, t in timed[::step] if x.service_class == name and t is not None]
        data.append(
            {
                "type": "scattergl",
                "mode": "markers",
                "name": name,
                "marker": {"size": 4},
                "x": [round(x.scheduled_s, 3) for x, _ in mine],
                "y": [round(t.ttft_s, 5) for _, t in mine if t is not None],
                "text": [f"request {x.id}" for x, _ in mine],
            }
        )
    failed = [x for x, t in timed if t is None]
    if failed:
        data.append(
            {
                "type": "scattergl",
                "mode": "markers",
                "name": "failed",
                "marker": {"symbol": "x", "color": "#e5484d", "size": 7},
                "x": [round(x.scheduled_s, 3) for x in failed],
                "y": [round((x.ended_s or x.scheduled_s) - x.scheduled_s, 5) for x in failed],
                "text": [f"request {x.id}: {x.error}" for x in failed],
            }
        )
    load = report.run.load
    cut = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": a, "x1": b, "y0": 0, "y1": 1,
         "line": {"width": 0}, "fillcolor": "rgba(128,128,128,0.15)"}
        for a, b in ((0, load.from_s), (load.to_s, max(load.span_s, load.to_s)))
        if b > a
    ]  # fmt: skip
    layout = axes("scheduled, s", "TTFT, s") | {"shapes": cut}
    caption = "Each point is a request, at the time it was due; grey is cut."
    return "Time to first token over time", caption, {"data": data, "layout": layout}


def load_over_time(report: BenchReport) -> Plot:
    """Return requests in flight and tokens per second."""
    times, server = report.timeline, report.run.server
    data = [
        line(times.at_s, times.concurrency, "in flight"),
        line(times.at_s, times.output_tokens_per_s, "output tok/s (right)") | {"yaxis": "y2"},
    ]
    for name in ("num_requests_running", "num_requests_waiting"):
        if name in server.gauges:
            label = f"server: {name.removeprefix('num_requests_')}"
            data.append(line(server.sampled_s, server.gauges[name], label))
    layout = axes("s", "requests") | {"yaxis2": right("tok/s")}
    return "Load over time", report.saturation.why, {"data": data, "layout": layout}


def latencies(report: BenchReport, timed: list[tuple[Exchange, Latency | None]]) -> Plot:
    """Return the share of requests (of gaps) below a latency."""
    load = report.run.load
    inside = [t for x, t in timed if t is not None and load.from_s <= x.scheduled_s <= load.to_s]
    exact = bool(inside) and inside[0].exact
    series = {
        "TTFT": [t.ttft_s for t in inside],
        "TPOT": [t.tpot_s for t in inside if t.tpot_s is not None],
        "ITL" if exact else "chunk gap": [gap for t in inside for gap in t.gaps_s],
        "e2e": [t.e2e_s for t in inside],
    }
    data = [
        line(np.percentile(values, SHARES).round(6).tolist(), (SHARES / 100).tolist(), name)
        for name, values in series.items()
        if values
    ]
    layout = axes("s", "share below")
    layout["xaxis"] |= {"type": "log"}
    caption = "A steep line is an even service; what bends to the right at the top is the tail."
    return "Latencies", caption, {"data": data, "layout": layout}


def lengths(report: BenchReport, timed: list[tuple[Exchange, Latency | None]]) -> Plot:
    """Return histograms of prompt and answer tokens, counted here so that the page stays small."""
    answered = [x for x, t in timed if t is not None]
    data = []
    for name, values in (
        ("prompt", [x.num_prompt for x in answered]),
        ("answer", [x.num_output for x in answered]),
    ):
        if values:
            counts, edges = np.histogram(values, bins=60)
            middles = ((edges[1:] + edges[:-1]) / 2).round(1)
            data.append(
                {"type": "bar", "name": name, "x": middles.tolist(), "y": counts.tolist(),
                 "width": float(edges[1] - edges[0]), "opacity": 0.7}
            )  # fmt: skip
    layout = axes("tokens", "requests") | {"barmode": "overlay"}
    shared = report.sharing[0].sentence if report.sharing else "No two prompts begin alike."
    return "Tokens of prompts and answers", shared, {"data": data, "layout": layout}


def goodput_curve(report: BenchReport) -> Plot:
    """Return attainment and goodput by rate."""
    search = report.goodput_search
    assert search is not None
    points = sorted(search.points, key=lambda p: p.rate)
    rates = [p.rate for p in points]
    marked = {"mode": "lines+markers"}
    data = [
        line(rates, [p.attainment for p in points], "attainment") | marked,
        line(rates, [p.goodput_per_s for p in points], "goodput/s (right)")
        | marked
        | {"yaxis": "y2"},
        line([rates[0], rates[-1]], [search.attainment] * 2, "wanted"),
    ]
    layout = axes("requests/s", "share within objectives") | {"yaxis2": right("goodput/s")}
    layout["yaxis"] |= {"range": [0, 1.02]}
    return "Goodput", search.note, {"data": data, "layout": layout}
