"""Metric registry: vLLM's names under a prefix, in Prometheus' text format.

`ROWS` is the table of all metrics: name, kind, help, labels, buckets. Counting adds to plain
numbers; the text of `/metrics` is made by `render`. Every sample has the labels `model_name` and
`engine`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from headway.core.records import NO_STEP, StepRecord

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
GRAMMAR_BUCKETS_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BUCKETS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Definition of one metric: a counter, a gauge or a histogram.

    `known` are values of its one label whose series exist from the start: a rate over a series
    that begins with its first event misses that event. `vllm` is vLLM's name where it differs; the
    prefix `headway:` serves that old name beside the new one. `of_step` is the field of the last
    `StepRecord` that a gauge shows; no code sets such a gauge.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()
    vllm: str = ""
    of_step: str = ""


G, C, H = "gauge", "counter", "histogram"

COMMON_LABELS = ("model_name", "engine")
CACHE_CONFIG = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
)
"""Labels of `cache_config_info`, named as vLLM's. The blocks are those of the device, a GPU or not;
the concurrency is the number of requests of the full context length that fit."""
LAST_WITH_OLD_NAMES = "0.3"
ROWS = (
    MetricRow("num_requests_running", G, "Running sequences.", of_step="num_running"),
    MetricRow("num_requests_waiting", G, "Waiting sequences.", of_step="num_waiting"),
    MetricRow(
        "num_requests_waiting_by_reason",
        G,
        "Waiting sequences, by reason: a slot (capacity), or their grammar (deferred).",
        ("reason",),
        known=("capacity", "deferred"),
    ),
    MetricRow(
        "queue_age_seconds",
        G,
        "Age of the oldest request that waits for its first step, by class; 0 where none waits.",
        ("class",),
    ),
    MetricRow("num_requests_admitted", G, "Admitted HTTP requests that have not ended."),
    MetricRow("kv_cache_usage_perc", G, "Share of KV blocks in use, 0 to 1.", of_step="kv_usage"),
    MetricRow("cache_config_info", G, "1; settings of the KV cache as labels.", CACHE_CONFIG),
    MetricRow("prefix_cache_queries", C, "Prompt tokens looked up in the prefix cache."),
    MetricRow("prefix_cache_hits", C, "Prompt tokens found in the prefix cache."),
    MetricRow(
        "prefix_cache_saved_seconds",
        C,
        "Predicted seconds of computing the cached tokens in a step of their own.",
    ),
    MetricRow("prompt_tokens", C, "Prompt tokens of requests whose first token was sent."),
    MetricRow(
        "prompt_tokens_by_source",
        C,
        "Prompt tokens of requests in their first step, computed or found in the prefix cache.",
        ("source",),
        known=("local_compute", "local_cache_hit"),
    ),
    MetricRow("prompt_tokens_cached", C, "Prompt tokens read from a cache instead of computed."),
    MetricRow(
        "prompt_tokens_cached_by_source",
        C,
        "Prompt tokens read from a cache instead of computed, by tier.",
        ("source",),
        known=("device", "host", "disk", "engine"),
    ),
    MetricRow("kv_tier_bytes", G, "Bytes of cached KV blocks, by tier.", ("tier",)),
    MetricRow(
        "kv_tier_seconds_saved",
        C,
        "Predicted seconds of computing the tokens read from a lower tier.",
        ("tier",),
        known=("host", "disk", "engine"),
    ),
    MetricRow(
        "kv_tier_read_seconds",
        C,
        "Seconds of KV reads from disk or from another engine.",
        ("tier",),
        known=("disk", "engine"),
    ),
    MetricRow(
        "kv_disk_failures",
        C,
        "KV reads from disk that failed or timed out, and damaged blocks.",
        ("kind",),
        known=("read", "damaged"),
    ),
    MetricRow("generation_tokens", C, "Tokens generated."),
    MetricRow(
        "request_success",
        C,
        "Sequences finished, by reason.",
        ("finished_reason",),
        known=("stop", "tool_calls", "length", "abort", "error"),
    ),
    MetricRow("num_preemptions", C, "Preempted sequences."),
    MetricRow(
        "preemptions",
        C,
        "Preempted sequences, by whether their KV is lost or copied to the host.",
        ("kv",),
        known=("lost", "copied"),
    ),
    MetricRow(
        "preempted_tokens",
        C,
        "Tokens of preempted sequences: computed again (lost), or copied to the host.",
        ("kv",),
        known=("lost", "copied"),
    ),
    MetricRow("estimated_flops_per_gpu", C, "FLOPs needed by the steps, on the one device."),
    MetricRow("estimated_read_bytes_per_gpu", C, "Bytes of weights and KV needed by the steps."),
    MetricRow(
        "spec_decode_num_drafts", C, "Verified drafts: draft tokens of one sequence in one step."
    ),
    MetricRow("spec_decode_num_draft_tokens", C, "Draft tokens."),
    MetricRow("spec_decode_num_accepted_tokens", C, "Accepted draft tokens."),
    MetricRow(
        "spec_decode_num_accepted_tokens_per_pos",
        C,
        "Accepted draft tokens, by their position in the draft, from 0.",
        ("position",),
    ),
    MetricRow(
        "spec_decode_num_draft_tokens_by_source", C, "Draft tokens, by proposer.", ("source",)
    ),
    MetricRow(
        "spec_decode_num_accepted_tokens_by_source",
        C,
        "Accepted draft tokens, by proposer.",
        ("source",),
    ),
    MetricRow("spec_decode_draft_seconds", C, "Seconds of the draft model."),
    MetricRow(
        "spec_decode_verify_seconds",
        C,
        "Extra seconds of steps for verifying draft tokens and forced tokens, by the step model.",
    ),
    MetricRow("jump_forward_tokens", C, "Tokens forced by a grammar, without sampling."),
    MetricRow(
        "admission_rejections",
        C,
        "Requests refused for load, state or a limit.",
        ("reason",),
        known=(
            *("queue_requests", "queue_bytes", "queue_seconds"),
            *("class_queue_requests", "class_queue_seconds"),
            *("key_queue_requests", "key_queue_seconds", "requests_at_once"),
            *("requests_per_minute", "tokens_per_minute", "long_queue", "given_up"),
            *("max_prompt_tokens", "max_output_tokens", "overloaded"),
        ),
    ),
    MetricRow("priced_tokens", C, "Tokens times the price of their class.", ("class",)),
    MetricRow(
        "fallback_requests",
        C,
        "Requests answered by the fallback model.",
        ("reason",),
        known=("queue", "late"),
    ),
    MetricRow(
        "time_to_first_token_seconds", H, "First token sent − arrived.", buckets=TTFT_BUCKETS_S
    ),
    MetricRow(
        "time_to_publish_seconds",
        H,
        "First text for the user sent − arrived; reasoning and tool calls do not count.",
        buckets=TTFT_BUCKETS_S,
    ),
    MetricRow("inter_token_latency_seconds", H, "Gap between tokens.", buckets=ITL_BUCKETS_S),
    MetricRow(
        "request_time_per_output_token_seconds",
        H,
        "(e2e − TTFT) / (tokens − 1) of a request.",
        buckets=ITL_BUCKETS_S,
    ),
    MetricRow("e2e_request_latency_seconds", H, "Last token − arrived.", buckets=LATENCY_BUCKETS_S),
    MetricRow(
        "request_queue_time_seconds", H, "First scheduled − arrived.", buckets=LATENCY_BUCKETS_S
    ),
    MetricRow(
        "request_prefill_time_seconds",
        H,
        "First token − first scheduled.",
        buckets=LATENCY_BUCKETS_S,
    ),
    MetricRow("request_decode_time_seconds", H, "Last token − first.", buckets=LATENCY_BUCKETS_S),
    MetricRow(
        "request_inference_time_seconds",
        H,
        "Last token − first scheduled.",
        buckets=LATENCY_BUCKETS_S,
    ),
    MetricRow(
        "iteration_tokens",
        H,
        "Tokens computed in a step.",
        buckets=STEP_TOKEN_BUCKETS,
        vllm="iteration_tokens_total",
    ),
    MetricRow("request_prompt_tokens", H, "Prompt tokens of a request.", buckets=LENGTH_BUCKETS),
    MetricRow(
        "request_prefill_kv_computed_tokens",
        H,
        "Prompt tokens of a request that were computed, not read from the prefix cache.",
        buckets=LENGTH_BUCKETS,
    ),
    MetricRow("request_generation_tokens", H, "Tokens of an answer.", buckets=LENGTH_BUCKETS),
    MetricRow(
        "request_max_num_generation_tokens",
        H,
        "Tokens of the longest of a request's sequences.",
        buckets=LENGTH_BUCKETS,
    ),
    MetricRow("request_params_n", H, "n of a request.", buckets=N_BUCKETS),
    MetricRow(
        "request_params_max_tokens",
        H,
        "max_tokens of a request; the rest of the context where it has none.",
        buckets=LENGTH_BUCKETS,
    ),
    MetricRow(
        "request_num_preemptions",
        H,
        "Preemptions of the sequences of a request.",
        buckets=PREEMPTION_BUCKETS,
    ),
    MetricRow("goodput_requests", C, "Requests that met all their objectives."),
    MetricRow("slo_requests", C, "Requests judged by their objectives, by class.", ("class",)),
    MetricRow("slo_met", C, "Requests that met all objectives, by class.", ("class",)),
    MetricRow(
        "slo_missed",
        C,
        "Objectives missed, by class; one request may miss several.",
        ("class", "which"),
    ),
    MetricRow("mfu_ratio", G, "FLOPs needed over the measured peak, last 10 s.", ("steps",)),
    MetricRow("mbu_ratio", G, "Bytes needed over the measured bandwidth, last 10 s.", ("steps",)),
    MetricRow(
        "step_cost_error_ratio",
        G,
        "Error of the predicted step time: abs(predicted / observed − 1), last 10 s.",
        ("quantile",),
    ),
    MetricRow("bottleneck", G, "1 for the verdict of the last 10 s, else 0.", ("kind",)),
    MetricRow(
        "grammar_compile_seconds",
        H,
        "Compiling the grammar of a structured output.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    MetricRow(
        "grammar_mask_seconds",
        H,
        "Computing the grammar masks of a step, in parallel with the model.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    MetricRow(
        "grammar_mask_wait_seconds",
        H,
        "Waiting time of a step for its grammar masks.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    MetricRow(
        "validation_failures",
        C,
        "Bodies or answers that did not validate.",
        ("kind",),
        known=("request", "tool_arguments"),
    ),
    MetricRow("tool_calls", C, "Tool calls in answers, complete or cut off."),
    MetricRow("client_retries", C, "Requests that a client sent again."),
    MetricRow("cost_usd", C, "Price per hour times the time served."),
    MetricRow(
        "task_cost_usd",
        C,
        "Machine time of tasks at the price per hour: in all, by key, task class and route.",
        ("dimension", "name"),
    ),
    MetricRow(
        "tasks_judged",
        C,
        "Tasks that were judged by POST /v1/outcomes.",
        ("dimension", "name", "outcome"),
    ),
    MetricRow(
        "cost_per_success_usd",
        G,
        "Cost of judged tasks, retries included, for each that succeeded.",
        ("dimension", "name"),
    ),
    MetricRow("engine_restarts", C, "Restarts of an engine."),
    MetricRow(
        "task_failures", C, "Failures of a background task, each followed by a restart.", ("task",)
    ),
    MetricRow(
        "engines",
        G,
        "Ready engines, by role: prefill, decode, or both.",
        ("role",),
        known=("both", "prefill", "decode"),
    ),
    MetricRow(
        "engines_asked",
        G,
        "Engines that the recent traffic needs, at the pace that the default class promises.",
        ("kind",),
        known=("prefill", "decode"),
    ),
    MetricRow(
        "kv_handovers",
        C,
        "Handovers of a request from its prefill engine, by outcome.",
        ("outcome",),
        known=("taken", "refused", "stayed", "lost"),
    ),
    MetricRow(
        "kv_handover_seconds",
        H,
        "Time from the first token in one engine to the next one in another.",
        buckets=TTFT_BUCKETS_S,
    ),
)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; the last count is of values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value; a bucket holds the values up to and including its bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: np.ndarray) -> None:
        """Count many values at once."""
        new_counts = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + int(new) for count, new in zip(self.counts, new_counts, strict=True)]
        self.sum += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """Return [(bound, number of values up to it), …, ("+Inf", all)]."""
        pairs, total = [], 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            pairs.append((str(bound), float(total)))
        return pairs


class Registry:
    """Metrics of one served model: `values[name][labels]` and `histograms[name]`."""

    def __init__(self, model_name: str, *, prefix: str = "headway") -> None:
        self.prefix = prefix
        self.values: dict[str, dict[tuple[str, ...], float]] = {
            row.name: {} if row.labels else {(): 0.0} for row in ROWS if row.kind != H
        }
        self.histograms = {row.name: Histogram(row.buckets) for row in ROWS if row.kind == H}
        self._known: dict[str, list[tuple[str, ...]]] = {
            row.name: [(value,) for value in row.known] for row in ROWS
        }
        self._common = (model_name, "0")
        self._steps = {0: NO_STEP}
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Add `amount` to a counter."""
        values = self.values[name]
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge; None removes the sample."""
        if value is None:
            self.values[name].pop(labels, None)
        else:
            self.values[name][labels] = value

    def show_steps(self, records: dict[int, StepRecord]) -> None:
        """Set the last step by engine, from which the gauges with `of_step` are read."""
        self._steps = records

    def observe(self, name: str, value: float | None) -> None:
        """Count a value of a histogram; None is ignored."""
        if value is not None:
            self.histograms[name].observe(value)

    def expect(self, name: str, *labels: str) -> None:
        """Create the series of these labels with the value 0."""
        self._known[name].append(labels)

    def counts(self, name: str) -> dict[str, int]:
        """Return a counter with one label as {label: count}."""
        return {labels[0]: int(value) for labels, value in self.values[name].items()}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics (interface of a collector of prometheus_client)."""
        for row in ROWS:
            if row.vllm and self.prefix == "vllm":
                yield self._family(row, row.vllm, row.help)
                continue
            yield self._family(row, row.name, row.help)
            if row.vllm:
                help = f"Old name of {row.name}, until version {LAST_WITH_OLD_NAMES}. {row.help}"
                yield self._family(row, row.vllm, help)

    def _family(self, row: MetricRow, name: str, help: str) -> Metric:
        """Return one metric with its samples, under `name`."""
        labels, name = (*COMMON_LABELS, *row.labels), f"{self.prefix}:{name}"
        if row.kind == H:
            histogram = self.histograms[row.name]
            buckets = HistogramMetricFamily(name, help, labels=labels)
            buckets.add_metric(self._common, histogram.cumulative(), histogram.sum)
            return buckets
        kind = CounterMetricFamily if row.kind == C else GaugeMetricFamily
        plain = kind(name, help, labels=labels)
        if row.of_step:
            for engine, record in self._steps.items():
                value = float(getattr(record, row.of_step))
                plain.add_metric((self._common[0], str(engine)), value)
            return plain
        samples = dict.fromkeys(self._known[row.name], 0.0) | self.values[row.name]
        for extra, value in samples.items():
            plain.add_metric((*self._common, *extra), value)
        return plain

    def render(self) -> bytes:
        """Return the text of `/metrics`."""
        return generate_latest(self._collectors)
