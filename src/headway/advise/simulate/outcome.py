"""The result of a simulation as the load generator's own report: the same figures, files and pages.

Each figure comes with its error. A calibration cannot tell when the machine will be slow or fast:
the runs of one simulation draw that anew, and two more run on a machine that is slower, or faster,
by as much as its pace varied during the calibration. The interval of a figure covers all of these.
"""

from collections.abc import Callable

import msgspec

from headway.bench.report import BenchReport, build_report
from headway.bench.run import Bench, load_record
from headway.measure.record import ClientCost, Exchange, RecordedRun, ServerRecord

FEATURES = ["ignore_eos", "min_tokens", "return_token_ids", "stream_options"]


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """The lowest and the highest value of all runs."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


class Simulation(msgspec.Struct, kw_only=True):
    """The basis of a simulated report.

    `label` is calibrated, transferred or roofline; `extrapolated` the share of steps beyond what
    was measured; `drift` the variation of the machine's pace during the calibration; `intervals` by
    figure.
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


class SimulatedReport(BenchReport, kw_only=True):
    """A report of `headway bench`, with the basis of the simulation."""

    simulation: Simulation


def report_of(
    bench: Bench, exchanges: list[Exchange], model: str, label: str, head: str
) -> BenchReport:
    """Return the report of one run, derived like that of a real one."""
    end_s = max((x.ended_s for x in exchanges if x.ended_s is not None), default=0.0)
    span_s = bench.traffic.span_s
    if bench.options.concurrency is not None:
        span_s = span_s or max((x.scheduled_s for x in exchanges), default=0.0)
    span_s = float(span_s or end_s or 1e-9)
    run = RecordedRun(
        started_at=0.0,
        started_s=0.0,
        load=load_record(bench, span_s, max(end_s, span_s)),
        server=simulated_server(model, label, bench.options.endpoint),
        client=ClientCost(cpu_s=0.0, wall_s=max(end_s, span_s)),
        exchanges=exchanges,
    )
    return build_report(run, head)


def simulated_server(model: str, label: str, endpoint: str) -> ServerRecord:
    """Return the server's entry in the report."""
    return ServerRecord(
        url=f"simulated ({label})", model=model, endpoint=endpoint, features=list(FEATURES)
    )


Figure = Callable[[BenchReport], float | None]


def percentile(name: str, share: str) -> Figure:
    """Return a function that reads one percentile of one distribution of a report."""

    def figure(report: BenchReport) -> float | None:
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


def intervals(reports: list[BenchReport]) -> dict[str, Interval]:
    """Return each figure's lowest and highest value over these runs."""
    bounds = {}
    for name, figure in FIGURES.items():
        values = [value for report in reports if (value := figure(report)) is not None]
        if values:
            bounds[name] = Interval(round(min(values), 9), round(max(values), 9))
    return bounds
