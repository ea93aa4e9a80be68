"""The report of a run: every figure is derived from the raw run and nothing else.

Requests *scheduled* in the window count for latencies, attainment and goodput; tokens and answers
*received* in the window count for throughput. Goodput is the requests per second that met all of
their objectives: 30 of 100 sent in one second are 30; a failed request never counts.
"""

from collections import Counter
from itertools import chain

import msgspec

from headway.bench.checks import Check, ClientVerdict, Saturation, client_verdict, run_checks
from headway.bench.checks import saturation as judge_saturation
from headway.bench.latency import Latency, latency
from headway.bench.percentiles import Distribution, distribution
from headway.bench.timeline import RunTimeline, timeline, tokens_in
from headway.core.slo import Slo, parse_slo
from headway.measure.record import Exchange, RecordedRun
from headway.perf.roofline import ratio
from headway.telemetry.formulas import HOUR_S, usd_per_million
from headway.telemetry.prefixes import SharedPrefix


class RequestFigures(msgspec.Struct, kw_only=True):
    """Distributions over requests (over gaps for the two gap rows), in seconds and tokens.

    `itl_s` where the server says how many tokens a chunk holds, else `chunk_gap_s`.
    """

    ttft_s: Distribution | None
    publish_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    chunk_gap_s: Distribution | None
    e2e_s: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    lag_s: Distribution | None


class Rates(msgspec.Struct, kw_only=True):
    """Rates per second: throughput of the window; offered rate and goodput of its part in which
    requests were sent. Goodput and attainment are None without objectives."""

    offered_per_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    token_goodput_per_s: float | None
    attainment: float | None
    cache_hit_rate: float | None
    usd_per_million_tokens: float | None = None
    usd_per_request: float | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    """Requests of the window by how they ended; `cut` lie outside. Reasons are of failures."""

    counted: int
    ok: int
    failed: int
    timeouts: int
    refused: int
    errors: int
    cut: int
    reasons: dict[str, int]


class ClassReport(msgspec.Struct, kw_only=True, rename={"remaining_budget": "budget_left"}):
    """One class of traffic. `missed` counts requests by objective, failures under `failed`.

    `remaining_budget` is the share of the allowed misses that is not used: at 90% attainment 100
    requests may miss 10; after 4 misses 0.6 remains, after 15 −0.5.
    """

    slo: str
    counts: RequestCounts
    rates: Rates
    figures: RequestFigures
    missed: dict[str, int]
    remaining_budget: float | None


class GoodputPoint(msgspec.Struct, kw_only=True, rename={"meets_slo": "kept"}):
    """One run of the search."""

    rate: float
    offered_per_s: float
    attainment: float
    goodput_per_s: float
    output_tokens_per_s: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    meets_slo: bool
    why: str = ""


class GoodputSearch(msgspec.Struct, kw_only=True):
    """The highest rate that kept the attainment, and the curve to it."""

    attainment: float
    best_rate: float | None
    goodput_per_s: float | None
    points: list[GoodputPoint]
    note: str = ""


class BenchReport(msgspec.Struct, kw_only=True):
    """The complete report; `run` holds the raw timestamps, from which all else can be derived
    again."""

    format: str = "headway-bench"
    version: int = 1
    headway: str
    figures: RequestFigures
    rates: Rates
    counts: RequestCounts
    classes: dict[str, ClassReport]
    timeline: RunTimeline
    checks: list[Check]
    client: ClientVerdict
    saturation: Saturation
    sharing: list[SharedPrefix] = []
    goodput_search: GoodputSearch | None = None
    run: RecordedRun


TimedExchange = tuple[Exchange, Latency | None]


def build_report(
    run: RecordedRun,
    headway: str,
    sharing: list[SharedPrefix] | None = None,
    search: GoodputSearch | None = None,
) -> BenchReport:
    """Return the report of a run."""
    load = run.load
    timed: list[TimedExchange] = [(x, latency(x)) for x in run.exchanges]
    counted = [pair for pair in timed if load.from_s <= pair[0].scheduled_s <= load.to_s]
    slos = {name: parse_slo(text) for name, text in load.slos.items()}
    names = dict.fromkeys(x.service_class for x in run.exchanges)
    alone = len(names) == 1
    figures = figures_of(counted)
    times = timeline(run, timed)
    saturated = judge_saturation(load, counted, times)
    client = client_verdict(run, figures.lag_s, figures.ttft_s)
    rates = rates_of(run, timed, counted, slos)
    return BenchReport(
        headway=headway,
        figures=figures,
        rates=rates,
        counts=counts_of(counted, len(timed) - len(counted)),
        classes={
            name: class_report(run, timed, counted, slos, name, (figures, rates) if alone else None)
            for name in names
        },
        timeline=times,
        checks=run_checks(run, timed, counted, times, client),
        client=client,
        saturation=saturated,
        sharing=sharing or [],
        goodput_search=search,
        run=run,
    )


def class_report(
    run: RecordedRun,
    timed: list[TimedExchange],
    counted: list[TimedExchange],
    slos: dict[str, Slo],
    name: str,
    of_all: tuple[RequestFigures, Rates] | None,
) -> ClassReport:
    """Return the part of one class; where it is the only one its figures and rates are those
    `of_all`."""
    mine = [pair for pair in counted if pair[0].service_class == name]
    all_mine = [pair for pair in timed if pair[0].service_class == name]
    judged = mine if name in slos else []
    missed = Counter(chain.from_iterable([misses(slos[name], x, t) for x, t in judged]))
    figures, rates = of_all or (figures_of(mine), rates_of(run, all_mine, mine, slos))
    allowed = (1 - run.load.attainment) * len(mine)
    spent = None if rates.attainment is None else (1 - rates.attainment) * len(mine)
    return ClassReport(
        slo=run.load.slos.get(name, ""),
        counts=counts_of(mine, len(all_mine) - len(mine)),
        rates=rates,
        figures=figures,
        missed=dict(missed),
        remaining_budget=None if spent is None or allowed <= 0 else 1 - spent / allowed,
    )


def misses(slo: Slo, x: Exchange, timed: Latency | None) -> tuple[str, ...]:
    """Return the objectives that a request missed; ("failed",) when there was no whole answer."""
    if timed is None:
        return ("failed",)
    gap_s = None if slo.itl_p99_s is None else timed.gap_p99_s
    return slo.missed(timed.ttft_s, timed.tpot_s, gap_s, timed.e2e_s)


def figures_of(counted: list[TimedExchange]) -> RequestFigures:
    """Return the distributions of some requests."""
    timed = [t for _, t in counted if t is not None]
    answered = [x for x, t in counted if t is not None]
    return RequestFigures(
        ttft_s=distribution(t.ttft_s for t in timed),
        publish_s=distribution(t.publish_s for t in timed),
        tpot_s=distribution(t.tpot_s for t in timed),
        itl_s=distribution(chain.from_iterable([t.gaps_s for t in timed if t.exact])),
        chunk_gap_s=distribution(chain.from_iterable([t.gaps_s for t in timed if not t.exact])),
        e2e_s=distribution(t.e2e_s for t in timed),
        prompt_tokens=distribution(x.num_prompt for x in answered),
        output_tokens=distribution(x.num_output for x in answered),
        lag_s=distribution(x.sent_s - x.scheduled_s for x, _ in counted if x.sent_s is not None),
    )


def counts_of(counted: list[TimedExchange], cut: int) -> RequestCounts:
    """Return how requests ended. Refused: no connection, or 429 or 503."""
    reasons = Counter(x.error or "unfinished" for x, timed in counted if timed is None)
    refused = sum(reasons[r] for r in ("refused", "status 429", "status 503"))
    failed = reasons.total()
    return RequestCounts(
        counted=len(counted),
        ok=len(counted) - failed,
        failed=failed,
        timeouts=reasons["timeout"],
        refused=refused,
        errors=failed - refused - reasons["timeout"],
        cut=cut,
        reasons=dict(reasons),
    )


def rates_of(
    run: RecordedRun, timed: list[TimedExchange], counted: list[TimedExchange], slos: dict[str, Slo]
) -> Rates:
    """Return throughput by what was received in the window, goodput by what was scheduled in it."""
    load = run.load
    window_s = max(load.to_s - load.from_s, 1e-9)
    sent_s = max(min(load.to_s, load.span_s) - load.from_s, 1e-9)
    answered = [x for x, t in timed if t is not None and load.from_s <= x.chunk_s[-1] <= load.to_s]
    begun = [x for x, t in timed if t is not None and load.from_s <= x.chunk_s[0] <= load.to_s]
    output = sum(tokens_in(x, load.from_s, load.to_s) for x, _ in timed)
    input_tokens = sum(x.num_prompt for x in begun)
    judged = [pair for pair in counted if pair[0].service_class in slos]
    met = [x for x, t in judged if not misses(slos[x.service_class], x, t)]
    prompts = [x for x, t in counted if t is not None and x.cached_tokens is not None]
    price = load.price_per_hour
    tokens = input_tokens + output
    return Rates(
        offered_per_s=len(counted) / sent_s,
        requests_per_s=len(answered) / window_s,
        input_tokens_per_s=input_tokens / window_s,
        output_tokens_per_s=output / window_s,
        goodput_per_s=len(met) / sent_s if judged else None,
        token_goodput_per_s=sum(x.num_output for x in met) / sent_s if judged else None,
        attainment=len(met) / len(judged) if judged else None,
        cache_hit_rate=sum(x.cached_tokens or 0 for x in prompts)
        / max(sum(x.num_prompt for x in prompts), 1)
        if prompts
        else None,
        usd_per_million_tokens=None if price is None else usd_per_million(price, tokens / window_s),
        usd_per_request=None if price is None else ratio(price * window_s / HOUR_S, len(answered)),
    )
