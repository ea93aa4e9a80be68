"""The report of a load test as one HTML page: the answer, a plot of each series, all figures."""

import io

import numpy as np
from rich.console import Console

from headway.bench.latency import Latency, latency
from headway.bench.report import BenchReport
from headway.bench.table import heading, milliseconds, show_report
from headway.measure.onepage import one_page, preformatted, section
from headway.measure.plot import BAD, Plot, Series, bars, line
from headway.measure.record import Exchange

MAX_POINTS = 4000
MAX_FAILED_SHARE = 0.01
SHARES = np.concatenate([np.linspace(0, 99, 100), np.linspace(99.1, 100, 10)])


def html(report: BenchReport) -> str:
    """Return the page."""
    return one_page(
        f"{report.run.server.model} · headway bench",
        headline(report),
        heading(report),
        all_plots(report),
        [section("All figures", preformatted(as_text(report)))],
        figures=main_figures(report),
        tone=tone(report),
    )


def headline(report: BenchReport) -> str:
    """Return the answer: goodput where there are objectives, else throughput; then failures."""
    rates, counts = report.rates, report.counts
    failed = f"; {counts.failed} of {counts.counted} failed" if counts.failed else ""
    if report.goodput_search is not None:
        return report.goodput_search.note
    if rates.goodput_per_s is not None and rates.attainment is not None:
        return (
            f"{rates.goodput_per_s:.2f} of {rates.requests_per_s:.2f} requests/s met their "
            f"objectives ({rates.attainment:.0%}){failed}"
        )
    speed = f"{rates.output_tokens_per_s:,.0f} output tok/s"
    return f"{rates.requests_per_s:.2f} requests/s, {speed}{failed}"


def tone(report: BenchReport) -> str:
    """Return the headline's colour: bad where the server was over-saturated or 1% failed."""
    counts = report.counts
    many = counts.failed > MAX_FAILED_SHARE * counts.counted
    return "bad" if many or report.saturation.over_saturated else ""


def main_figures(report: BenchReport) -> list[tuple[str, str]]:
    """Return the figures that stand below the headline."""
    rates, figures = report.rates, report.figures
    pairs = [
        ("requests/s", f"{rates.requests_per_s:.2f}"),
        ("output tok/s", f"{rates.output_tokens_per_s:,.0f}"),
    ]
    for name, each in (("TTFT", figures.ttft_s), ("TPOT", figures.tpot_s)):
        if each is not None:
            pairs += [
                (f"{name} p50", milliseconds(each.p50)),
                (f"{name} p99", milliseconds(each.p99)),
            ]
    if rates.usd_per_million_tokens is not None:
        pairs.append(("a million tokens", f"${rates.usd_per_million_tokens:.2f}"))
    return pairs


def as_text(report: BenchReport) -> str:
    """Return what the terminal shows, without colours."""
    written = io.StringIO()
    show_report(report, Console(file=written, width=150, no_color=True))
    return written.getvalue()


def all_plots(report: BenchReport) -> list[Plot]:
    """Return the plots."""
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
    """Return each request at its scheduled time, a colour for each class, failures in red."""
    step = max(1, len(timed) // MAX_POINTS)
    data = []
    for name in report.classes:
        mine = [(x, t) for x, t in timed[::step] if x.service_class == name and t is not None]
        data.append(
            Series(
                kind="points",
                name=name,
                x=[x.scheduled_s for x, _ in mine],
                y=[t.ttft_s for _, t in mine],
                notes=[f"request {x.id}" for x, _ in mine],
            )
        )
    data.append(failures([x for x, t in timed if t is None][:MAX_POINTS]))
    load = report.run.load
    spans = (0.0, load.from_s), (load.to_s, max(load.span_s, load.to_s))
    return Plot(
        title="Time to first token over time",
        caption="Each point is a request, at the time it was due; grey is cut.",
        x="scheduled, s",
        y="TTFT, s",
        series=data,
        cut=[(a, b) for a, b in spans if b > a],
    )


def failures(failed: list[Exchange]) -> Series:
    """Return the requests that failed, at the time that they took to."""
    return Series(
        kind="points",
        name="failed",
        colour=BAD,
        x=[x.scheduled_s for x in failed],
        y=[(x.ended_s or x.scheduled_s) - x.scheduled_s for x in failed],
        notes=[f"request {x.id}: {x.error}" for x in failed],
    )


def load_over_time(report: BenchReport) -> Plot:
    """Return requests in flight and tokens per second."""
    times, server = report.timeline, report.run.server
    data = [
        line("in flight", times.at_s, times.concurrency),
        line("output tok/s", times.at_s, times.output_tokens_per_s, right=True),
    ]
    for name in ("num_requests_running", "num_requests_waiting"):
        known = [
            (at_s, value)
            for at_s, value in zip(server.sampled_s, server.gauges.get(name, []), strict=False)
            if value is not None
        ]
        label = f"server: {name.removeprefix('num_requests_')}"
        data.append(line(label, [at for at, _ in known], [v for _, v in known]))
    why = report.saturation.why
    return Plot(
        title="Load over time", caption=why, x="s", y="requests", right="tok/s", series=data
    )


def latencies(report: BenchReport, timed: list[tuple[Exchange, Latency | None]]) -> Plot:
    """Return the share of requests (of gaps) below a latency."""
    load = report.run.load
    shares = (SHARES / 100).tolist()
    inside = [t for x, t in timed if t is not None and load.from_s <= x.scheduled_s <= load.to_s]
    exact = bool(inside) and inside[0].exact
    series = {
        "TTFT": [t.ttft_s for t in inside],
        "TPOT": [t.tpot_s for t in inside if t.tpot_s is not None],
        "ITL" if exact else "chunk gap": [gap for t in inside for gap in t.gaps_s],
        "e2e": [t.e2e_s for t in inside],
    }
    return Plot(
        title="Latencies",
        caption="A steep line is an even service; what bends to the right at the top is the tail.",
        x="s",
        y="share below",
        log_x=True,
        series=[
            line(name, np.percentile(values, SHARES).tolist(), shares)
            for name, values in series.items()
            if values
        ],
    )


def lengths(report: BenchReport, timed: list[tuple[Exchange, Latency | None]]) -> Plot:
    """Return histograms of prompt and answer tokens, with the same bins."""
    answered = [x for x, t in timed if t is not None]
    values = {
        "prompt": [x.num_prompt for x in answered],
        "answer": [x.num_output for x in answered],
    }
    edges = np.histogram_bin_edges([n for each in values.values() for n in each] or [0], bins=60)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    return Plot(
        title="Tokens of prompts and answers",
        caption=report.sharing[0].sentence if report.sharing else "No two prompts begin alike.",
        x="tokens",
        y="requests",
        series=[
            bars(name, middles, np.histogram(each, edges)[0].tolist())
            for name, each in values.items()
            if each
        ],
    )


def goodput_curve(report: BenchReport) -> Plot:
    """Return attainment and goodput by rate."""
    search = report.goodput_search
    assert search is not None
    points = sorted(search.points, key=lambda p: p.rate)
    rates = [p.rate for p in points]
    return Plot(
        title="Goodput",
        caption=f"{search.note} The dashed line is the attainment asked for.",
        x="requests/s",
        y="share within objectives",
        right="goodput/s",
        horizontals=[search.attainment],
        series=[
            line("attainment", rates, [p.attainment for p in points]),
            line("goodput/s", rates, [p.goodput_per_s for p in points], right=True),
        ],
    )
