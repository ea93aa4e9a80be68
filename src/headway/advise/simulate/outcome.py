"""What came of a simulation, as the load generator's own report: the same figures, files and pages.

Each figure comes with its error. What a calibration cannot know is when the machine will have its
good and its bad times: the runs of one simulation draw them anew, and two more run on a machine
that is as much slower, or faster, as it was from one part of its calibration to another. The
interval of a figure reaches over all of these.
"""

from collections.abc import Callable, Iterator

import msgspec

from headway.bench.report import Report, build_report
from headway.bench.run import Bench, described
from headway.measure.record import ClientCost, Exchange, Run, Server

FEATURES = ["ignore_eos", "min_tokens", "return_token_ids", "stream_options"]


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """The lowest and the highest value of all runs."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


class Simulation(msgspec.Struct, kw_only=True):
    """What stands behind a simulated report.

    `label` is calibrated, transferred or roofline; `extrapolated` the share of steps beyond what
    was measured; `drift` by how much the machine's pace varied while it was; `intervals` by figure.
    """

    label: str
    extrapolated: float
    drift: float
    runs: int
    replicas: int
    num_steps: int
    num_retries: int
    busy_share: float
    intervals: dict[str, Interval]
    notes: list[str] = []


class SimulatedReport(Report, kw_only=True):
    """A report of `headway bench`, and how far to trust it."""

    simulation: Simulation


def report_of(bench: Bench, exchanges: list[Exchange], model: str, label: str, head: str) -> Report:
    """The report of one run, derived as that of a real one is."""
    end_s = max((x.ended_s for x in exchanges if x.ended_s is not None), default=0.0)
    span_s = bench.traffic.span_s
    if bench.options.concurrency is not None:
        span_s = span_s or max((x.scheduled_s for x in exchanges), default=0.0)
    span_s = float(span_s or end_s or 1e-9)
    run = Run(
        started_at=0.0,
        started_s=0.0,
        load=described(bench, span_s, max(end_s, span_s)),
        server=nobody(model, label, bench.options.endpoint),
        client=ClientCost(cpu_s=0.0, wall_s=max(end_s, span_s)),
        exchanges=exchanges,
    )
    return build_report(run, head)


def nobody(model: str, label: str, endpoint: str) -> Server:
    """The server that there was none of."""
    return Server(
        url=f"simulated ({label})", model=model, endpoint=endpoint, features=list(FEATURES)
    )


Figure = Callable[[Report], float | None]


def percentile(name: str, share: str) -> Figure:
    """One percentile of one distribution of a report."""

    def figure(report: Report) -> float | None:
        distribution = getattr(report.figures, name)
        return None if distribution is None else float(getattr(distribution, share))

    return figure


FIGURES: dict[str, Figure] = {
    **{
        f"{name}_{share}_s": percentile(f"{name}_s", share)
        for name in ("ttft", "tpot", "e2e")
        for share in ("p50", "p99")
    },
    "attainment": lambda r: r.rates.attainment,
    "goodput_per_s": lambda r: r.rates.goodput_per_s,
    "requests_per_s": lambda r: r.rates.requests_per_s,
    "output_tokens_per_s": lambda r: r.rates.output_tokens_per_s,
    "refused_share": lambda r: r.counts.refused / max(r.counts.counted, 1),
}
"""Name → where it stands in a report; None where there is none."""


def intervals(reports: list[Report]) -> dict[str, Interval]:
    """Each figure's lowest and highest value over these runs."""
    return dict(found(reports))


def found(reports: list[Report]) -> Iterator[tuple[str, Interval]]:
    for name, figure in FIGURES.items():
        values = [value for report in reports if (value := figure(report)) is not None]
        if values:
            yield name, Interval(round(min(values), 9), round(max(values), 9))
