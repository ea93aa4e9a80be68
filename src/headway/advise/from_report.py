"""A reading from a report of `headway bench`: what the client saw, and the server's counters."""

from typing import Any

from headway.advise.reading import Reading
from headway.bench.percentiles import Distribution
from headway.bench.report import Report
from headway.telemetry.snapshot import Percentiles

NOT_KNOWN = (
    "bytes and FLOPs of a step: TPOT has no floor here; `headway doctor URL` during a run tells",
)
NO_SERVER = "the server's queue and prefill: it has no /metrics that we read"


def reading_from_report(
    subject: str, report: Report, *, price_per_hour: float | None = None
) -> Reading:
    """The window of the run."""
    figures, rates, counts = report.figures, report.rates, report.counts
    gauges, counters = report.run.server.gauges, report.run.server.counters
    queue, prefill = timed(counters, "queue"), timed(counters, "prefill")
    prompt = percentiles(figures.prompt_tokens)
    price = price_per_hour
    if price is None:
        price = report.run.load.price_per_hour
    usd = None
    if price is not None and rates.output_tokens_per_s:
        usd = price / 3600 / rates.output_tokens_per_s * 1e6
    waiting = known(gauges.get("num_requests_waiting", []))
    running = known(gauges.get("num_requests_running", []))
    return Reading(
        source="report",
        subject=subject,
        server=f"{report.run.server.model} at {report.run.server.url}",
        seconds=report.run.load.to_s - report.run.load.from_s,
        not_known=NOT_KNOWN if queue.count else (*NOT_KNOWN, NO_SERVER),
        num_ended=counts.counted,
        num_failed=counts.failed,
        refused=counts.refused,
        errors=dict(counts.reasons),
        arrivals_per_s=rates.offered_per_s,
        finished_per_s=rates.requests_per_s,
        running=mean(running),
        waiting=mean(waiting),
        waiting_growth=waiting[-1] - waiting[0] if waiting else None,
        over_saturated=report.saturation.over_saturated,
        ttft=percentiles(figures.ttft_s),
        tpot=percentiles(figures.tpot_s),
        itl=percentiles(figures.itl_s or figures.chunk_gap_s),
        e2e=percentiles(figures.e2e_s),
        queue=queue,
        prefill=prefill,
        transfer_s=transfer(figures.ttft_s, queue, prefill),
        prompt=prompt,
        output=percentiles(figures.output_tokens),
        short_prompt=prompt.p50,
        longest_prompt=figures.prompt_tokens.max if figures.prompt_tokens else None,
        kv_usage_max=max(known(gauges.get("kv_cache_usage_perc", [])), default=None),
        num_preemptions=preemptions(counters),
        cache_hit_rate=hit_rate(report),
        **shared(report, prompt.mean or 0.0),
        client_bottleneck=report.client.why if report.client.bottleneck else "",
        price_per_hour=price,
        usd_per_million_output=usd,
    )


def percentiles(found: Distribution | None) -> Percentiles:
    """A distribution under the server's names."""
    if found is None:
        return Percentiles()
    return Percentiles(**{name: getattr(found, name) for name in Percentiles.__struct_fields__})


def timed(counters: dict[str, float], part: str) -> Percentiles:
    """The mean of a server's histogram over the run; its percentiles are not kept."""
    count = int(counters.get(f"request_{part}_time_seconds_count", 0))
    if not count:
        return Percentiles()
    total_s = counters[f"request_{part}_time_seconds_sum"]
    return Percentiles(count=count, mean=total_s / count)


def transfer(ttft: Distribution | None, queue: Percentiles, prefill: Percentiles) -> float | None:
    """What is left of the client's TTFT without the server's queue and prefill."""
    if ttft is None or queue.mean is None or prefill.mean is None:
        return None
    return max(ttft.mean - queue.mean - prefill.mean, 0.0)


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def preemptions(counters: dict[str, float]) -> int | None:
    count = counters.get("num_preemptions_total")
    return None if count is None else int(count)


def hit_rate(report: Report) -> float | None:
    """As requests were told; else as the server counts."""
    if report.rates.cache_hit_rate is not None:
        return report.rates.cache_hit_rate
    counters = report.run.server.counters
    queries = counters.get("prefix_cache_queries_total")
    return counters.get("prefix_cache_hits_total", 0.0) / queries if queries else None


def shared(report: Report, prompt: float) -> dict[str, Any]:
    """Tokens of a mean prompt that others began with; words are scaled to the prompt's tokens.

    40 of 50 requests share 384 tokens: a mean prompt has 0.8 · 384 = 307 that were sent before
    (the first of each group had to be computed: 39 / 50).
    """
    total = len(report.run.exchanges)
    if not report.sharing or not total:
        return {}
    sent = 0.0
    for each in report.sharing:
        scale = 1.0
        if each.unit != "tokens" and each.median_length:
            scale = prompt / each.median_length
        sent += (each.requests - 1) * each.shared * scale
    best = max(report.sharing, key=lambda each: each.requests * each.shared)
    return {"shared_tokens": sent / total, "shared_said": best.said.rstrip(".")}
