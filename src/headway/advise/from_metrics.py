"""A reading from `/metrics` of any server with vLLM's metric names: two texts, and gauges in
between.

Counters and histograms are read as their growth between the two texts; percentiles are interpolated
within buckets. What these metrics do not contain (bytes, ceilings, steps) is listed as not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from headway.advise.reading import (
    FaultReading,
    KVReading,
    LatencyReading,
    LengthReading,
    LoadReading,
    PrefixReading,
    ServerReading,
    SpendReading,
    StepReading,
)
from headway.telemetry.snapshot import Percentiles

LATENCIES = {
    "ttft": ("time_to_first_token_seconds",),
    "tpot": ("request_time_per_output_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds",),
    "prefill": ("request_prefill_time_seconds",),
}
LENGTHS = {"prompt": ("request_prompt_tokens",), "output": ("request_generation_tokens",)}
"""Field of a reading → its metric names, the newest first."""
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
QUERIES = ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total")
HITS = ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total")
NOT_KNOWN = (
    "bytes and FLOPs of a step and the machine's ceilings: no floor of TPOT, no MFU, no MBU",
    "which requests are read slowly, and how far the longest prompt is from the others",
    "whether prompts share a prefix: `headway bench` reports it",
)


@dataclass(slots=True)
class Scrape:
    """One text: plain samples summed over labels, histograms as cumulative (bound, count)."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    prefix: str = ""
    model: str = ""

    def first(self, names: Sequence[str]) -> float | None:
        """Return the value of the first name that exists."""
        return next((self.values[name] for name in names if name in self.values), None)


def parse_scrape(text: str) -> Scrape:
    """Read a text; samples of several engines are added (of shares the largest is taken)."""
    scrape = Scrape()
    for family in text_string_to_metric_families(text):
        prefix, colon, _ = family.name.partition(":")
        if not colon:
            continue
        scrape.prefix = prefix
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            scrape.model = sample.labels.get("model_name", scrape.model)
            if name.endswith("_bucket"):
                bounds = scrape.buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + sample.value
                continue
            combine = max if name.endswith(("_perc", "_ratio")) else float.__add__
            scrape.values[name] = combine(scrape.values.get(name, 0.0), float(sample.value))
            for label in ("finished_reason", "kind", "reason"):
                if label in sample.labels:
                    counts = scrape.by_label.setdefault(name, {})
                    key = sample.labels[label]
                    counts[key] = counts.get(key, 0.0) + sample.value
    return scrape


def reading_from_metrics(
    subject: str,
    scrapes: Sequence[Scrape],
    *,
    seconds: float,
    transfer_s: float | None = None,
    price_per_hour: float | None = None,
) -> ServerReading:
    """Return the reading of the time between the first scrape and the last."""
    first, last = scrapes[0], scrapes[-1]
    prompt = histogram_growth(first, last, LENGTHS["prompt"])
    output = histogram_growth(first, last, LENGTHS["output"])
    generated = counter_growth(first, last, "generation_tokens_total")
    return ServerReading(
        source="metrics",
        subject=subject,
        server=f"{last.prefix} metrics of {last.model or 'a model'}",
        seconds=seconds,
        not_known=NOT_KNOWN,
        load=load(scrapes, seconds),
        latency=LatencyReading(
            **{name: histogram_growth(first, last, names) for name, names in LATENCIES.items()},
            transfer_s=transfer_s,
        ),
        lengths=LengthReading(prompt=prompt, output=output, short_prompt=prompt.p50),
        steps=StepReading(idle_share=idle_share(scrapes)),
        kv=kv(scrapes),
        prefix=prefix(first, last),
        faults=faults(first, last),
        spend=SpendReading(
            price_per_hour=price_per_hour,
            usd_per_million_output=output_price(price_per_hour, generated, seconds),
        ),
    )


def load(scrapes: Sequence[Scrape], seconds: float) -> LoadReading:
    """Return arrivals, and running and waiting requests."""
    first, last = scrapes[0], scrapes[-1]
    ended = int(
        histogram_growth(first, last, LATENCIES["e2e"]).count
        or counter_growth(first, last, "request_success_total")
    )
    waiting = [scrape.values.get("num_requests_waiting") for scrape in scrapes]
    judged = counter_growth(first, last, "slo_requests_total")
    return LoadReading(
        num_ended=ended,
        arrivals_per_s=max(ended + in_flight(last) - in_flight(first), 0.0) / seconds,
        finished_per_s=ended / seconds,
        running=mean_known([scrape.values.get("num_requests_running") for scrape in scrapes]),
        waiting=mean_known(waiting),
        waiting_growth=(waiting[-1] or 0.0) - (waiting[0] or 0.0),
        in_slo=counter_growth(first, last, "slo_met_total") / judged if judged else None,
    )


def idle_share(scrapes: Sequence[Scrape]) -> float | None:
    """Return the share of the scrapes at which no request was running."""
    running = [scrape.values.get("num_requests_running") for scrape in scrapes]
    if all(count is None for count in running):
        return None
    return 1 - sum((count or 0) > 0 for count in running) / len(running)


def kv(scrapes: Sequence[Scrape]) -> KVReading:
    """Return the highest KV use of the scrapes, and the preemptions between first and last."""
    return KVReading(
        usage_max=max_known([scrape.first(KV_USAGE) for scrape in scrapes]),
        num_preemptions=int(counter_growth(scrapes[0], scrapes[-1], "num_preemptions_total")),
    )


def prefix(first: Scrape, last: Scrape) -> PrefixReading:
    """Return prefix cache hits over lookups."""
    queries = counter_growth(first, last, *QUERIES)
    return PrefixReading(hit_rate=counter_growth(first, last, *HITS) / queries if queries else None)


def faults(first: Scrape, last: Scrape) -> FaultReading:
    """Return the errors that were counted between the two scrapes."""
    return FaultReading(
        num_failed=int(reasons(first, last).get("error", 0)),
        validation_failures=int(counter_growth(first, last, "validation_failures_total")),
        refused=int(counter_growth(first, last, "admission_rejections_total")),
        num_retries=int(counter_growth(first, last, "client_retries_total")),
        num_restarts=int(counter_growth(first, last, "engine_restarts_total")),
    )


def counter_growth(first: Scrape, last: Scrape, *names: str) -> float:
    """Return the growth of a counter, under the first of its names that exists."""
    return max((last.first(names) or 0.0) - (first.first(names) or 0.0), 0.0)


def in_flight(scrape: Scrape) -> float:
    """Return the number of requests inside the server."""
    names = ("num_requests_running", "num_requests_waiting")
    return sum(scrape.values.get(name, 0.0) for name in names)


def output_price(price: float | None, generated: float, seconds: float) -> float | None:
    """Return dollars per million output tokens: all spend, since it cannot be split without
    steps."""
    if price is None or not generated:
        return None
    return price * seconds / 3600 / generated * 1e6


def reasons(first: Scrape, last: Scrape) -> dict[str, float]:
    """Return finish reason → number of requests between the two scrapes."""
    name = "request_success_total"
    before, after = first.by_label.get(name, {}), last.by_label.get(name, {})
    return {reason: count - before.get(reason, 0.0) for reason, count in after.items()}


def histogram_growth(first: Scrape, last: Scrape, names: Sequence[str]) -> Percentiles:
    """Return mean and percentiles of the growth of a histogram; empty where it does not exist."""
    for name in names:
        if name not in last.buckets:
            continue
        before = first.buckets.get(name, {})
        buckets = [(b, c - before.get(b, 0.0)) for b, c in sorted(last.buckets[name].items())]
        count = buckets[-1][1]
        if count <= 0:
            continue
        total = last.values.get(f"{name}_sum", 0.0) - first.values.get(f"{name}_sum", 0.0)
        return Percentiles(
            count=int(count),
            mean=total / count,
            **{f"p{p}": quantile(buckets, p / 100) for p in (50, 90, 95, 99)},
        )
    return Percentiles()


def quantile(cumulative: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile, linear within its bucket; above all finite bounds the last finite bound.

    [(1, 0), (2, 10), (inf, 10)] at 0.5 is half-way into the bucket from 1 to 2: 1.5.
    """
    rank = share * cumulative[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *cumulative]):
        if upto >= rank and upto > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / (upto - below)
    return cumulative[-1][0]


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def max_known(values: Sequence[float | None]) -> float | None:
    """Return the highest of the known values."""
    return max((value for value in values if value is not None), default=None)
