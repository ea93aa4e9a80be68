"""A reading from a report of `headway bench`: the client's figures and the server's counters."""

from headway.advise.reading import (
    ClientReading,
    FaultReading,
    KVReading,
    LatencyReading,
    LengthReading,
    LoadReading,
    PrefixReading,
    ServerReading,
    SpendReading,
)
from headway.bench.percentiles import Distribution
from headway.bench.report import BenchReport
from headway.telemetry.snapshot import Percentiles

NOT_KNOWN = (
    "bytes and FLOPs of a step: TPOT has no floor here; `headway doctor URL` during a run has it",
)
NO_SERVER = "the server's queue and prefill: it has no readable /metrics"


def reading_from_report(
    subject: str, report: BenchReport, *, price_per_hour: float | None = None
) -> ServerReading:
    """Return the reading of the window of the run."""
    queue, prefill = server_mean(report, "queue"), server_mean(report, "prefill")
    return ServerReading(
        source="report",
        subject=subject,
        server=f"{report.run.server.model} at {report.run.server.url}",
        seconds=report.run.load.to_s - report.run.load.from_s,
        not_known=NOT_KNOWN if queue.count else (*NOT_KNOWN, NO_SERVER),
        load=load(report),
        client=ClientReading(bottleneck=report.client.why if report.client.bottleneck else ""),
        latency=latency(report, queue, prefill),
        lengths=lengths(report),
        kv=kv(report),
        prefix=prefix(report),
        faults=faults(report),
        spend=spend(report, price_per_hour),
    )


def load(report: BenchReport) -> LoadReading:
    """Return arrivals and ends; running and waiting requests by the server's gauges."""
    waiting, running = gauge(report, "num_requests_waiting"), gauge(report, "num_requests_running")
    return LoadReading(
        num_ended=report.counts.counted,
        arrivals_per_s=report.rates.offered_per_s,
        finished_per_s=report.rates.requests_per_s,
        running=mean(running),
        waiting=mean(waiting),
        waiting_growth=waiting[-1] - waiting[0] if waiting else None,
        over_saturated=report.saturation.over_saturated,
        in_slo=report.rates.attainment,
    )


def latency(report: BenchReport, queue: Percentiles, prefill: Percentiles) -> LatencyReading:
    """Return the client's latencies, and the server's queue and prefill times."""
    figures = report.figures
    return LatencyReading(
        ttft=percentiles(figures.ttft_s),
        tpot=percentiles(figures.tpot_s),
        itl=percentiles(figures.itl_s or figures.chunk_gap_s),
        e2e=percentiles(figures.e2e_s),
        queue=queue,
        prefill=prefill,
        transfer_s=transfer_seconds(figures.ttft_s, queue, prefill),
    )


def lengths(report: BenchReport) -> LengthReading:
    """Return the tokens of prompts and answers."""
    prompt_tokens = report.figures.prompt_tokens
    prompt = percentiles(prompt_tokens)
    return LengthReading(
        prompt=prompt,
        output=percentiles(report.figures.output_tokens),
        short_prompt=prompt.p50,
        longest_prompt=prompt_tokens.max if prompt_tokens else None,
    )


def kv(report: BenchReport) -> KVReading:
    """Return KV use and preemptions by the server's gauges and counters."""
    count = report.run.server.counters.get("num_preemptions_total")
    return KVReading(
        usage_max=max(gauge(report, "kv_cache_usage_perc"), default=None),
        num_preemptions=None if count is None else int(count),
    )


def faults(report: BenchReport) -> FaultReading:
    """Return the errors that the client received."""
    counts = report.counts
    return FaultReading(
        num_failed=counts.failed, refused=counts.refused, errors=dict(counts.reasons)
    )


def spend(report: BenchReport, override: float | None) -> SpendReading:
    """Return all spend over the output tokens, at the price `override`, else at the run's own."""
    price, per_s = override, report.rates.output_tokens_per_s
    if price is None:
        price = report.run.load.price_per_hour
    usd = price / 3600 / per_s * 1e6 if price is not None and per_s else None
    return SpendReading(price_per_hour=price, usd_per_million_output=usd)


def percentiles(distribution: Distribution | None) -> Percentiles:
    """Return a distribution as the server's type."""
    if distribution is None:
        return Percentiles()
    return Percentiles(
        **{name: getattr(distribution, name) for name in Percentiles.__struct_fields__}
    )


def server_mean(report: BenchReport, part: str) -> Percentiles:
    """Return the mean of a server's histogram over the run; a report does not hold its
    percentiles."""
    counters = report.run.server.counters
    count = int(counters.get(f"request_{part}_time_seconds_count", 0))
    if not count:
        return Percentiles()
    total_s = counters[f"request_{part}_time_seconds_sum"]
    return Percentiles(count=count, mean=total_s / count)


def transfer_seconds(
    ttft: Distribution | None, queue: Percentiles, prefill: Percentiles
) -> float | None:
    """Return the client's mean TTFT less the server's queue and prefill times."""
    if ttft is None or queue.mean is None or prefill.mean is None:
        return None
    return max(ttft.mean - queue.mean - prefill.mean, 0.0)


def gauge(report: BenchReport, name: str) -> list[float]:
    """Return the known values of a gauge during the run, in order."""
    return [value for value in report.run.server.gauges.get(name, []) if value is not None]


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def hit_rate(report: BenchReport) -> float | None:
    """Return the cache hit rate by the usage of the answers; else by the server's counters."""
    if report.rates.cache_hit_rate is not None:
        return report.rates.cache_hit_rate
    counters = report.run.server.counters
    queries = counters.get("prefix_cache_queries_total")
    return counters.get("prefix_cache_hits_total", 0.0) / queries if queries else None


def prefix(report: BenchReport) -> PrefixReading:
    """Return the tokens of a mean prompt that an earlier prompt began with; words are scaled to
    tokens.

    40 of 50 requests share 384 tokens: all but the first sent them again, 39 · 384 / 50 = 300.
    """
    total, length = len(report.run.exchanges), percentiles(report.figures.prompt_tokens).mean
    if not report.sharing or not total:
        return PrefixReading(hit_rate=hit_rate(report))
    sent = 0.0
    for each in report.sharing:
        scale = 1.0
        if each.unit != "tokens" and each.median_length:
            scale = (length or 0.0) / each.median_length
        sent += (each.requests - 1) * each.shared * scale
    best = max(report.sharing, key=lambda each: each.requests * each.shared)
    return PrefixReading(
        hit_rate=hit_rate(report), shared_tokens=sent / total, shared_text=best.sentence.rstrip(".")
    )
