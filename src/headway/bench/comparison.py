"""Comparison of two reports: the ratio of each figure, and whether it is beyond noise.

Noise is judged by a moving-block bootstrap: requests are resampled in runs of neighbours, since
neighbours wait in the same queue, and the ratio of two runs is beyond noise when 95% of the
resampled ratios lie on one side of 1. Two runs of one load on one server should be within it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from headway.bench.latency import Latency, latency
from headway.bench.report import BenchReport, misses
from headway.bench.timeline import weights
from headway.core.slo import parse_slo
from headway.measure.record import Exchange, RecordedRun

DRAWS = 1000
LOW, HIGH = 2.5, 97.5
Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One figure of both; `low` and `high` bound the ratio B / A in 95% of the samples."""

    name: str
    unit: str
    first: float
    second: float
    low: float | None
    high: float | None
    more_is_better: bool

    @property
    def ratio(self) -> float | None:
        """Return B / A."""
        return self.second / self.first if self.first else None

    @property
    def beyond_noise(self) -> bool | None:
        """Return whether the ratio is beyond noise; None where that cannot be judged."""
        if self.low is None or self.high is None:
            return None
        return self.low > 1 or self.high < 1

    @property
    def verdict(self) -> str:
        """Return whether B is better, worse, or within noise."""
        if self.beyond_noise is None or self.ratio is None:
            return ""
        if not self.beyond_noise:
            return "within noise"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportComparison:
    """All rows, and the differences between the two loads."""

    rows: list[ComparisonRow]
    differences: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """A figure: a value for each request, and a statistic over them."""

    name: str
    unit: str
    value: Callable[[Exchange, Latency], float | None]
    statistic: Statistic
    more_is_better: bool = False


def percentile(share: float) -> Statistic:
    """Return the statistic that takes a percentile over the last axis."""
    return lambda values: np.percentile(values, share, axis=-1)


def mean(values: Values) -> Values:
    means: Values = np.mean(values, axis=-1)
    return means


LATENCIES: tuple[tuple[str, Callable[[Exchange, Latency], float | None]], ...] = (
    ("TTFT", lambda x, t: t.ttft_s * 1e3),
    ("TPOT", lambda x, t: None if t.tpot_s is None else t.tpot_s * 1e3),
    ("gap p99 of a request", lambda x, t: None if t.gap_p99_s is None else t.gap_p99_s * 1e3),
    ("e2e", lambda x, t: t.e2e_s * 1e3),
)
STATISTICS = (
    ("p50", percentile(50)),
    ("p90", percentile(90)),
    ("p99", percentile(99)),
    ("mean", mean),
)
FIGURES = (
    *(
        ComparedFigure(name=f"{label} {name}", unit="ms", value=value, statistic=statistic)
        for label, value in LATENCIES
        for name, statistic in STATISTICS
    ),
    ComparedFigure(
        name="answer tokens mean", unit="", value=lambda x, t: x.num_output, statistic=mean
    ),
    ComparedFigure(
        name="prompt tokens mean", unit="", value=lambda x, t: x.num_prompt, statistic=mean
    ),
)


def compare(first: BenchReport, second: BenchReport, seed: int = 0) -> ReportComparison:
    """Return every figure that both reports have."""
    rng = np.random.default_rng(seed)
    rows = []
    for figure in FIGURES:
        a, b = (values_of(report.run, figure) for report in (first, second))
        if len(a) and len(b):
            rows.append(compare_figure(figure.name, figure.unit, a, b, figure.statistic, rng))
    a, b = (tokens_by_second(report.run) for report in (first, second))
    rows.append(compare_figure("output tok/s", "", a, b, mean, rng, more_is_better=True))
    if first.run.load.slos and second.run.load.slos:
        a, b = (slo_outcomes(report.run) for report in (first, second))
        rows.append(compare_figure("attainment", "", a, b, mean, rng, more_is_better=True))
        rows.append(scaled_row("goodput/s", rows[-1], first, second))
    return ReportComparison(rows=rows, differences=differences(first.run, second.run))


def scaled_row(
    name: str, attained: ComparisonRow, first: BenchReport, second: BenchReport
) -> ComparisonRow:
    """Return the row of goodput: it is attainment × the offered rate, with the noise of
    attainment."""
    a, b = first.rates.goodput_per_s or 0.0, second.rates.goodput_per_s or 0.0
    scale = (b / a) / attained.ratio if a and attained.ratio else None
    return ComparisonRow(
        name=name,
        unit="",
        first=a,
        second=b,
        low=attained.low * scale if scale and attained.low is not None else None,
        high=attained.high * scale if scale and attained.high is not None else None,
        more_is_better=True,
    )


def window_requests(run: RecordedRun) -> list[Exchange]:
    """Return the requests of the window by time."""
    inside = [x for x in run.exchanges if run.load.from_s <= x.scheduled_s <= run.load.to_s]
    return sorted(inside, key=lambda x: x.scheduled_s)


def values_of(run: RecordedRun, figure: ComparedFigure) -> Values:
    """Return the figure of each answered request."""
    timed = [(x, latency(x)) for x in window_requests(run)]
    values = [figure.value(x, t) for x, t in timed if t is not None]
    return np.array([value for value in values if value is not None], dtype=float)


def tokens_by_second(run: RecordedRun) -> Values:
    """Return the output tokens of each second of the window."""
    from_s, to_s = run.load.from_s, run.load.to_s
    count = max(1, round(to_s - from_s))
    edges = np.linspace(from_s, to_s, count + 1)
    total = np.zeros(count)
    for x in run.exchanges:
        if x.chunk_s:
            total += np.histogram(x.chunk_s, edges, weights=weights(x))[0]
    rates: Values = total / (edges[1] - edges[0])
    return rates


def slo_outcomes(run: RecordedRun) -> Values:
    """Return 1 for each request that met its objectives, else 0."""
    slos = {name: parse_slo(text) for name, text in run.load.slos.items()}
    judged = [x for x in window_requests(run) if x.service_class in slos]
    outcomes = [0.0 if misses(slos[x.service_class], x, latency(x)) else 1.0 for x in judged]
    return np.array(outcomes or [0.0])


def compare_figure(
    name: str,
    unit: str,
    a: Values,
    b: Values,
    statistic: Statistic,
    rng: np.random.Generator,
    more_is_better: bool = False,
) -> ComparisonRow:
    """Return the row of one figure, with the bounds of its ratio."""
    first, second = float(statistic(a)), float(statistic(b))
    low = high = None
    if len(a) > 1 and len(b) > 1 and first > 0 and second > 0:
        drawn_a, drawn_b = (
            statistic(bootstrap_samples(a, rng)),
            statistic(bootstrap_samples(b, rng)),
        )
        usable = drawn_a > 0
        ratios = drawn_b[usable] / drawn_a[usable]
        low, high = (float(p) for p in np.percentile(ratios, [LOW, HIGH]))
    return ComparisonRow(
        name=name,
        unit=unit,
        first=first,
        second=second,
        low=low,
        high=high,
        more_is_better=more_is_better,
    )


def bootstrap_samples(values: Values, rng: np.random.Generator) -> Values:
    """Return DRAWS samples of the same length, made of blocks of n^⅓ neighbours: 1000 values, 10
    each."""
    n = len(values)
    block = max(1, round(n ** (1 / 3)))
    starts = rng.integers(0, n, (DRAWS, -(-n // block)))
    places = (starts[:, :, None] + np.arange(block)) % n
    return values[places.reshape(DRAWS, -1)[:, :n]]


def differences(first: RecordedRun, second: RecordedRun) -> list[str]:
    """Return the differences between the two loads, which make a ratio meaningless."""
    texts = []
    for name in ("loop", "arrivals", "workload", "seed", "concurrency", "speed", "scale", "slos"):
        a, b = getattr(first.load, name), getattr(second.load, name)
        if a != b:
            texts.append(f"{name}: {a} and {b}")
    rates = first.load.rate or 0.0, second.load.rate or 0.0
    if abs(rates[0] - rates[1]) > 0.01 * max(rates):
        texts.append(f"rate: {rates[0]:.3g} and {rates[1]:.3g} requests/s")
    for name in ("model", "endpoint", "features"):
        a, b = getattr(first.server, name), getattr(second.server, name)
        if a != b:
            texts.append(f"{name}: {a} and {b}")
    return texts


def show_comparison(
    comparison: ReportComparison, first: str, second: str, console: Console
) -> None:
    """Print the rows."""
    for line in comparison.differences:
        console.print(f"[bold yellow]![/] not the same load: {line}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in (f"A {first}", f"B {second}", "B / A", "95% of draws"):
        table.add_column(column, justify="right")
    table.add_column("B is")
    styles = {"better": "green", "worse": "red", "within noise": "dim", "": "dim"}
    for each in comparison.rows:
        unit = f" {each.unit}" if each.unit else ""
        bounds = "–" if each.low is None else f"{each.low:.3f} … {each.high:.3f}"
        table.add_row(
            each.name,
            f"{each.first:,.2f}{unit}",
            f"{each.second:,.2f}{unit}",
            "–" if each.ratio is None else f"{each.ratio:.3f}",
            bounds,
            f"[{styles[each.verdict]}]{each.verdict}[/]",
        )
    console.print(table)
