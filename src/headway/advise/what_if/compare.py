"""The present case and a changed one, simulated side by side.

Both have the same arrivals and the same pace of the machine (common random numbers), so the
difference is the effect of the change. The gain is that of the reported pair; its interval covers
all pairs: other times, and a machine slower or faster by as much as it varied.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from headway.advise.simulate.outcome import Interval
from headway.advise.what_if.case import WhatIfCase, run
from headway.bench.latency import latency
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS
from headway.measure.record import Exchange
from headway.telemetry.goodput import FAILED, OK, REFUSED, judge

NUM_RUNS = 3


class CaseFigures(msgspec.Struct, kw_only=True):
    """Figures of one run in seconds; None where no request has one."""

    request_s: float | None
    """Mean time of an answered request."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    in_slo: float
    refused: float


class Gain(msgspec.Struct, kw_only=True):
    """The gain of a change.

    `share` is the saved share of a mean answered request's time, `points` the growth of the share
    of requests within their objectives. Where many requests are refused only `points` is
    meaningful: a request that is now admitted and waits had no time before. `label` is that of the
    simulation.
    """

    change: str
    label: str
    now: CaseFigures
    then: CaseFigures
    share: float
    share_interval: Interval
    points: float
    points_interval: Interval
    notes: list[str] = []


def figures(exchanges: list[Exchange], classes: dict[str, ServiceClass]) -> CaseFigures:
    """Return the figures that the clients of one run observe."""
    times = [each for x in exchanges if (each := latency(x)) is not None]
    met = [not missed(x, classes) for x in exchanges]
    ttft = [each.ttft_s for each in times]
    tpot = [each.tpot_s for each in times if each.tpot_s is not None]
    return CaseFigures(
        request_s=float(np.mean([each.e2e_s for each in times])) if times else None,
        ttft_p50_s=float(np.percentile(ttft, 50)) if ttft else None,
        ttft_p99_s=float(np.percentile(ttft, 99)) if ttft else None,
        tpot_p50_s=float(np.percentile(tpot, 50)) if tpot else None,
        in_slo=sum(met) / len(met),
        refused=sum(x.error.startswith("status") for x in exchanges) / len(exchanges),
    )


def missed(x: Exchange, classes: dict[str, ServiceClass]) -> tuple[str, ...]:
    """Return the objectives of its class that a request missed."""
    service_class = classes.get(x.service_class) or classes[DEFAULT_CLASS]
    times = latency(x)
    if times is None:
        return (REFUSED if x.error.startswith("status") else FAILED,)
    slo = service_class.objectives(x.asked_prompt_tokens - (x.cached_tokens or 0))
    return (
        judge(
            slo,
            OK,
            ttft_s=times.ttft_s,
            tpot_s=times.tpot_s,
            itl_p99_s=times.gap_p99_s,
            e2e_s=times.e2e_s,
        )
        or ()
    )


class PresentCase:
    """The case as it is, simulated once for all changes."""

    def __init__(self, case: WhatIfCase, *, runs: int = NUM_RUNS, seed: int = 0) -> None:
        self.case = case
        self.machinery = case.machinery()
        self.pairs = self.machinery.cases(runs, seed)
        self.figures = [figures(run(case, self.machinery, *p), case.classes) for p in self.pairs]

    def gain(self, case: WhatIfCase, change: str, watch: Callable[[], None] = lambda: None) -> Gain:
        """Return the gain of `case` over the present one."""
        machinery = case.machinery() if differs(case, self.case) else self.machinery
        then = []
        for pair in self.pairs:
            then.append(figures(run(case, machinery, *pair), case.classes))
            watch()
        shares = [time_saved(a, b) for a, b in zip(self.figures, then, strict=True)]
        points = [b.in_slo - a.in_slo for a, b in zip(self.figures, then, strict=True)]
        return Gain(
            change=change,
            label=machinery.label,
            now=self.figures[0],
            then=then[0],
            share=round(shares[0], 4),
            share_interval=value_range(shares),
            points=round(points[0], 4),
            points_interval=value_range(points),
            notes=list(machinery.notes),
        )


def differs(some: WhatIfCase, other: WhatIfCase) -> bool:
    """Return whether the same work takes another time in a step of the two."""
    a, b = some.settings, other.settings
    return (a.quantization, a.cache.dtype) != (b.quantization, b.cache.dtype)


def time_saved(now: CaseFigures, then: CaseFigures) -> float:
    """Return the saved share of a mean request's time; negative where it takes longer."""
    if not now.request_s or then.request_s is None:
        return 0.0
    return 1 - then.request_s / now.request_s


def value_range(values: list[float]) -> Interval:
    return Interval(round(min(values), 4), round(max(values), 4))
