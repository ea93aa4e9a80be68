"""As it is and as it would be, simulated side by side.

Both have the same arrivals and the same moments of the machine (common random numbers), so what
differs between them is the change. The gain is that of the reported pair; its interval reaches over
all pairs: other moments, and a machine slower or faster by as much as it varied.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from headway.advise.simulate.outcome import Interval
from headway.advise.what_if.case import Case, run
from headway.bench.latency import latency
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS
from headway.measure.record import Exchange
from headway.telemetry.goodput import FAILED, OK, REFUSED, judge

RUNS = 3


class Figures(msgspec.Struct, kw_only=True):
    """Of one run; seconds, None where no request has it."""

    request_s: float | None
    """The mean time of a request that was answered."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    in_slo: float
    refused: float


class Gain(msgspec.Struct, kw_only=True):
    """What a change gives. `share` of a mean answered request's time that it saves, `points` of
    requests that are in their objectives then and are not now (where many are refused only those
    tell: who is let in and waits had no time before). `label` as of a simulation."""

    change: str
    label: str
    now: Figures
    then: Figures
    share: float
    share_interval: Interval
    points: float
    points_interval: Interval
    notes: list[str] = []


def figures(found: list[Exchange], classes: dict[str, ServiceClass]) -> Figures:
    """What the clients of one run saw."""
    times = [each for x in found if (each := latency(x)) is not None]
    met = [not missed(x, classes) for x in found]
    ttft = [each.ttft_s for each in times]
    tpot = [each.tpot_s for each in times if each.tpot_s is not None]
    return Figures(
        request_s=float(np.mean([each.e2e_s for each in times])) if times else None,
        ttft_p50_s=float(np.percentile(ttft, 50)) if ttft else None,
        ttft_p99_s=float(np.percentile(ttft, 99)) if ttft else None,
        tpot_p50_s=float(np.percentile(tpot, 50)) if tpot else None,
        in_slo=sum(met) / len(met),
        refused=sum(x.error.startswith("status") for x in found) / len(found),
    )


def missed(x: Exchange, classes: dict[str, ServiceClass]) -> tuple[str, ...]:
    """The objectives of its class that a request missed."""
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


class Present:
    """The case as it is, simulated once for all changes."""

    def __init__(self, case: Case, *, runs: int = RUNS, seed: int = 0) -> None:
        self.case = case
        self.machinery = case.machinery()
        self.pairs = self.machinery.cases(runs, seed)
        self.figures = [figures(run(case, self.machinery, *p), case.classes) for p in self.pairs]

    def gain(self, case: Case, change: str, watch: Callable[[], None] = lambda: None) -> Gain:
        """What `case` gives beside the present one."""
        machinery = case.machinery() if differs(case, self.case) else self.machinery
        then = []
        for pair in self.pairs:
            then.append(figures(run(case, machinery, *pair), case.classes))
            watch()
        shares = [saved(a, b) for a, b in zip(self.figures, then, strict=True)]
        points = [b.in_slo - a.in_slo for a, b in zip(self.figures, then, strict=True)]
        return Gain(
            change=change,
            label=machinery.label,
            now=self.figures[0],
            then=then[0],
            share=round(shares[0], 4),
            share_interval=over(shares),
            points=round(points[0], 4),
            points_interval=over(points),
            notes=list(machinery.notes),
        )


def differs(some: Case, other: Case) -> bool:
    """Whether a step of the two takes another time for the same work."""
    a, b = some.settings, other.settings
    return (a.quantization, a.cache.dtype) != (b.quantization, b.cache.dtype)


def saved(now: Figures, then: Figures) -> float:
    """The share of a mean request's time; negative where it takes longer."""
    if not now.request_s or then.request_s is None:
        return 0.0
    return 1 - then.request_s / now.request_s


def over(values: list[float]) -> Interval:
    return Interval(round(min(values), 4), round(max(values), 4))
