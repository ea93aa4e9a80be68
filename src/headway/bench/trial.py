"""The two modes of `headway bench`: one run, or the search for the highest rate within
objectives."""

import random
from collections.abc import Callable, Coroutine
from typing import Any

from headway.bench.calibrate import read_calibration, write_calibration
from headway.bench.prompts import IdWriter
from headway.bench.report import BenchReport, GoodputPoint, GoodputSearch, build_report
from headway.bench.run import Bench, Watch, measure, prepare
from headway.bench.search import PRECISION, bounds, search_rate
from headway.bench.talk import BenchDialect
from headway.config.options import BenchOptions
from headway.core.slo import parse_slo
from headway.measure.record import RecordedRun
from headway.telemetry.prefixes import SharedPrefix, find_shared_prefixes

MAX_PROMPTS, MAX_PIECES = 200, 4096
"""Limits of the prompts, and of their pieces, in which shared prefixes are searched."""
CLIENT_LATE = "the client was late"
DRAIN_S = 30.0
"""Seconds that a run of the search waits for late answers where no objective bounds e2e."""

Trial = Callable[[str, BenchOptions, str, Watch | None], Coroutine[Any, Any, BenchReport]]


def outline(url: str, options: BenchOptions) -> str:
    """Return what `--dry-run` prints: the traffic that would be sent."""
    bench = prepare(url, options)
    lines = []
    for each in bench.classes:
        talks = [t for t in bench.traffic.conversations if t.service_class == each.name]
        turns = [turn for talk in talks for turn in talk.turns]
        prompt = sum(piece.tokens for turn in turns for piece in turn.system + turn.prompt)
        answer = sum(turn.output_tokens for turn in turns)
        lines.append(
            f"{each.name}: {each.options.workload}, {len(talks)} conversations of {len(turns)} "
            f"requests in {bench.traffic.span_s:.1f} s, {prompt:,} prompt tokens as asked, "
            f"{answer:,} answer tokens{f', {each.slo}' if each.slo else ''}"
        )
    return "\n".join(lines)


async def run_once(
    url: str, options: BenchOptions, version: str, watch: Watch | None
) -> BenchReport:
    """Run once and return the report."""
    bench = prepare(url, options)
    if options.calibrate:
        await read_calibration(url, options.api_key, options.model, 1.0)
    run, dialect = await measure(bench, watch)
    if options.calibrate:
        await write_calibration(url, options, run)
    return build_report(run, version, sharing(bench, dialect))


async def find_goodput(
    url: str,
    options: BenchOptions,
    version: str,
    watch: Watch | None,
    precision: float = PRECISION,
) -> BenchReport:
    """Run at one rate after another; return the report of the best one (else of the lowest)."""
    base = prepare(url, options)
    base_rate = len(base.traffic.conversations) / base.traffic.span_s
    runs: dict[float, tuple[RecordedRun, BenchDialect, Bench]] = {}

    async def at_rate(rate: float) -> GoodputPoint:
        bench = prepare(url, options, faster=rate / base_rate)
        run, dialect = await measure(bench, watch, drain_s=drain_seconds(bench))
        runs[rate] = run, dialect, bench
        return point(rate, build_report(run, version), options.attainment)

    points = await search_rate(at_rate, base_rate, options.max_rate, precision)
    meets_slo, _ = bounds(points)
    best = next((p for p in reversed(points) if p.meets_slo and p.rate == meets_slo), None)
    search = GoodputSearch(
        attainment=options.attainment,
        best_rate=best.rate if best else None,
        goodput_per_s=best.goodput_per_s if best else None,
        points=points,
        note=conclusion(points, best, options),
    )
    run, dialect, bench = runs[best.rate if best else min(runs)]
    return build_report(run, version, sharing(bench, dialect), search)


def conclusion(points: list[GoodputPoint], best: GoodputPoint | None, options: BenchOptions) -> str:
    """Return the result of the search in a sentence."""
    share = f"{options.attainment:.0%} of requests within their objectives"
    if best is None:
        return f"No rate down to {min(p.rate for p in points):.3g} requests/s keeps {share}."
    text = f"{best.rate:.3g} requests/s is the highest rate found that keeps {share}"
    above = min((p for p in points if p.rate > best.rate), key=lambda p: p.rate, default=None)
    if above is None:
        return f"{text}; none above was tried."
    late = " But there the client was late: the server may do more." if above.why else ""
    return f"{text}; {above.rate:.3g} does not.{late}"


def point(rate: float, report: BenchReport, attainment: float) -> GoodputPoint:
    """Return one run as a point of the curve.

    A late client makes latencies worse, never better: a rate that keeps the share in spite of it is
    kept, and one that does not is marked, for the server may do more.
    """
    rates, figures = report.rates, report.figures
    met = rates.attainment or 0.0
    meets_slo = met >= attainment
    return GoodputPoint(
        rate=rate,
        offered_per_s=rates.offered_per_s,
        attainment=met,
        goodput_per_s=rates.goodput_per_s or 0.0,
        output_tokens_per_s=rates.output_tokens_per_s,
        ttft_p99_s=figures.ttft_s.p99 if figures.ttft_s else None,
        tpot_p99_s=figures.tpot_s.p99 if figures.tpot_s else None,
        meets_slo=meets_slo,
        why=CLIENT_LATE if report.client.bottleneck and not meets_slo else "",
    )


def drain_seconds(bench: Bench) -> float:
    """Return how long after the last request an answer may still meet an objective, twice over."""
    longest = 0.0
    for each in bench.classes:
        slo = each.slo or parse_slo("e2e=30s")
        mine = [t for t in bench.traffic.conversations if t.service_class == each.name]
        tokens = max((turn.output_tokens for talk in mine for turn in talk.turns), default=0)
        if slo.e2e_s is not None:
            longest = max(longest, slo.e2e_s)
        elif slo.ttft_s is not None and slo.tpot_s is not None:
            longest = max(longest, slo.ttft_s + slo.tpot_s * tokens)
        else:
            longest = max(longest, DRAIN_S)
    return 2 * longest + 1


def sharing(bench: Bench, dialect: BenchDialect) -> list[SharedPrefix]:
    """Return where the prompts of this load begin to differ; of many, a random sample."""
    talks = bench.traffic.conversations
    chosen = sorted(random.Random(0).sample(range(len(talks)), min(MAX_PROMPTS, len(talks))))
    turns = [talks[i].turns[0] for i in chosen]
    prompts = [dialect.pieces(turn, MAX_PIECES) for turn in turns]
    system = [len(dialect.writer.pieces(turn.system, MAX_PIECES)) for turn in turns]
    ids = isinstance(dialect.writer, IdWriter)
    return find_shared_prefixes(
        prompts, names=chosen, system=system, unit="tokens" if ids else "words"
    )
