"""The metric registry: vLLM's names under a prefix, in Prometheus' text format.

It lives in the server process and is a table: name, kind, help, labels, buckets. Counting is adding
to plain numbers; the text is made when it is asked for. `model_name` and `engine` are on every
sample; `render` gives what `/metrics` serves.
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

from headway.core.records import BEFORE_ANY, StepRecord
from headway.telemetry.rows import (
    GRAMMAR_BUCKETS_S,
    ITL_BUCKETS_S,
    LATENCY_BUCKETS_S,
    LENGTH_BUCKETS,
    N_BUCKETS,
    PREEMPTION_BUCKETS,
    STEP_TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
    C,
    G,
    H,
    Row,
)

COMMON_LABELS = ("model_name", "engine")
CACHE_CONFIG = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
)
"""Labels of `cache_config_info`, named as vLLM's; the blocks are the device's, a GPU or not, the
concurrency is how many requests as long as the context the tokens are enough for."""
LAST_WITH_OLD_NAMES = "0.3"
ROWS = (
    Row("num_requests_running", G, "Sequences that advance in steps.", of_step="num_running"),
    Row("num_requests_waiting", G, "Sequences that wait.", of_step="num_waiting"),
    Row(
        "num_requests_waiting_by_reason",
        G,
        "Sequences that wait, by what for: a place (capacity), or their grammar (deferred).",
        ("reason",),
        known=("capacity", "deferred"),
    ),
    Row("num_requests_admitted", G, "HTTP requests that admission let in and that are not over."),
    Row("kv_cache_usage_perc", G, "Share of KV blocks in use, 0 to 1.", of_step="kv_usage"),
    Row("cache_config_info", G, "1; what the KV cache was set up with.", CACHE_CONFIG),
    Row("prefix_cache_queries", C, "Prompt tokens looked up in the prefix cache."),
    Row("prefix_cache_hits", C, "Prompt tokens found in the prefix cache."),
    Row(
        "prefix_cache_saved_seconds",
        C,
        "Predicted seconds of computing the tokens found, beside nothing else.",
    ),
    Row("prompt_tokens", C, "Prompt tokens of requests that gave their first token."),
    Row(
        "prompt_tokens_by_source",
        C,
        "Prompt tokens of requests in their first step, computed or found in the prefix cache.",
        ("source",),
        known=("local_compute", "local_cache_hit"),
    ),
    Row("prompt_tokens_cached", C, "Prompt tokens that needed no computing."),
    Row(
        "prompt_tokens_cached_by_source",
        C,
        "Prompt tokens that needed no computing, by where they were.",
        ("source",),
        known=("device", "host", "disk", "engine"),
    ),
    Row("kv_tier_bytes", G, "Bytes of KV blocks that are kept for later prompts.", ("tier",)),
    Row(
        "kv_tier_seconds_saved",
        C,
        "Predicted seconds of computing the tokens that a lower tier brought.",
        ("tier",),
        known=("host", "disk", "engine"),
    ),
    Row(
        "kv_tier_read_seconds",
        C,
        "What the reads from a disk or another engine took.",
        ("tier",),
        known=("disk", "engine"),
    ),
    Row(
        "kv_disk_failures",
        C,
        "Reads of KV blocks from the disk that brought nothing in time, and blocks found damaged.",
        ("kind",),
        known=("read", "damaged"),
    ),
    Row("generation_tokens", C, "Tokens generated."),
    Row(
        "request_success",
        C,
        "Sequences finished, by reason.",
        ("finished_reason",),
        known=("stop", "tool_calls", "length", "abort", "error"),
    ),
    Row("num_preemptions", C, "Sequences sent back to the queue."),
    Row(
        "preemptions",
        C,
        "Sequences sent back to the queue, by what becomes of their KV.",
        ("kv",),
        known=("lost", "copied"),
    ),
    Row(
        "preempted_tokens",
        C,
        "Tokens of sequences sent back: computed again (lost), or copied to the host.",
        ("kv",),
        known=("lost", "copied"),
    ),
    Row("estimated_flops_per_gpu", C, "FLOPs that the steps had to do, on the one device."),
    Row("estimated_read_bytes_per_gpu", C, "Bytes of weights and KV that they had to read."),
    Row("spec_decode_num_drafts", C, "Drafts verified: some tokens of one sequence in one step."),
    Row("spec_decode_num_draft_tokens", C, "Tokens of those drafts."),
    Row("spec_decode_num_accepted_tokens", C, "Draft tokens accepted."),
    Row(
        "spec_decode_num_accepted_tokens_per_pos",
        C,
        "Draft tokens accepted, by their position in the draft, from 0.",
        ("position",),
    ),
    Row("spec_decode_num_draft_tokens_by_source", C, "Draft tokens, by who guessed.", ("source",)),
    Row(
        "spec_decode_num_accepted_tokens_by_source",
        C,
        "Draft tokens accepted, by who guessed.",
        ("source",),
    ),
    Row("spec_decode_draft_seconds", C, "What the drafting model took."),
    Row(
        "spec_decode_verify_seconds",
        C,
        "What steps took longer for drafts and forced tokens, by the step cost.",
    ),
    Row("jump_forward_tokens", C, "Tokens that a grammar forced: known without being sampled."),
    Row(
        "admission_rejections",
        C,
        "Requests refused: load, state or a limit.",
        ("reason",),
        known=(
            *("queue_requests", "queue_bytes", "queue_seconds"),
            *("class_queue_requests", "class_queue_seconds"),
            *("key_queue_requests", "key_queue_seconds", "requests_at_once"),
            *("requests_per_minute", "tokens_per_minute", "long_queue", "given_up"),
            *("max_prompt_tokens", "max_output_tokens", "overloaded"),
        ),
    ),
    Row("priced_tokens", C, "Tokens times the price of their class.", ("class",)),
    Row(
        "fallback_requests",
        C,
        "Requests that the fallback answered.",
        ("reason",),
        known=("queue", "late"),
    ),
    Row("time_to_first_token_seconds", H, "First token leaves − arrived.", buckets=TTFT_BUCKETS_S),
    Row(
        "time_to_publish_seconds",
        H,
        "First text for the user leaves − arrived; reasoning and tool calls are none.",
        buckets=TTFT_BUCKETS_S,
    ),
    Row("inter_token_latency_seconds", H, "Gap between tokens.", buckets=ITL_BUCKETS_S),
    Row(
        "request_time_per_output_token_seconds",
        H,
        "(e2e − TTFT) / (tokens − 1) of a request.",
        buckets=ITL_BUCKETS_S,
    ),
    Row("e2e_request_latency_seconds", H, "Last token − arrived.", buckets=LATENCY_BUCKETS_S),
    Row("request_queue_time_seconds", H, "First scheduled − arrived.", buckets=LATENCY_BUCKETS_S),
    Row(
        "request_prefill_time_seconds",
        H,
        "First token − first scheduled.",
        buckets=LATENCY_BUCKETS_S,
    ),
    Row("request_decode_time_seconds", H, "Last token − first.", buckets=LATENCY_BUCKETS_S),
    Row(
        "request_inference_time_seconds",
        H,
        "Last token − first scheduled.",
        buckets=LATENCY_BUCKETS_S,
    ),
    Row(
        "iteration_tokens",
        H,
        "Tokens computed in a step.",
        buckets=STEP_TOKEN_BUCKETS,
        vllm="iteration_tokens_total",
    ),
    Row("request_prompt_tokens", H, "Prompt tokens of a request.", buckets=LENGTH_BUCKETS),
    Row(
        "request_prefill_kv_computed_tokens",
        H,
        "Prompt tokens of a request that were computed, not found in the prefix cache.",
        buckets=LENGTH_BUCKETS,
    ),
    Row("request_generation_tokens", H, "Tokens of an answer.", buckets=LENGTH_BUCKETS),
    Row(
        "request_max_num_generation_tokens",
        H,
        "Tokens of the longest of a request's sequences.",
        buckets=LENGTH_BUCKETS,
    ),
    Row("request_params_n", H, "n of a request.", buckets=N_BUCKETS),
    Row(
        "request_params_max_tokens",
        H,
        "max_tokens of a request; the rest of the context where it has none.",
        buckets=LENGTH_BUCKETS,
    ),
    Row(
        "request_num_preemptions",
        H,
        "How often sequences of a request were sent back to the queue.",
        buckets=PREEMPTION_BUCKETS,
    ),
    Row("goodput_requests", C, "Requests that met all their objectives."),
    Row("slo_requests", C, "Requests judged by their objectives, by class.", ("class",)),
    Row("slo_met", C, "Requests that met all objectives, by class.", ("class",)),
    Row(
        "slo_missed",
        C,
        "Objectives missed, by class; one request may miss several.",
        ("class", "which"),
    ),
    Row("mfu_ratio", G, "FLOPs needed over the measured peak, last 10 s.", ("steps",)),
    Row("mbu_ratio", G, "Bytes needed over the measured bandwidth, last 10 s.", ("steps",)),
    Row(
        "step_cost_error_ratio",
        G,
        "Predicted over actual time of a step, off from 1, last 10 s.",
        ("quantile",),
    ),
    Row("bottleneck", G, "1 for what bounds the last 10 s.", ("kind",)),
    Row(
        "grammar_compile_seconds",
        H,
        "Compiling the grammar of a structured output.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    Row(
        "grammar_mask_seconds",
        H,
        "Computing a step's grammar masks, beside the model.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    Row(
        "grammar_mask_wait_seconds",
        H,
        "What a step waited for its grammar masks.",
        buckets=GRAMMAR_BUCKETS_S,
    ),
    Row(
        "validation_failures",
        C,
        "Bodies or answers that did not validate.",
        ("kind",),
        known=("request", "tool_arguments"),
    ),
    Row("tool_calls", C, "Tool calls in answers, whole ones and those that broke off."),
    Row("client_retries", C, "Requests that a client sent again."),
    Row("cost_usd", C, "Price per hour times the time served."),
    Row(
        "task_cost_usd",
        C,
        "Machine time of tasks at the price per hour: in all, by key, task class and route.",
        ("dimension", "name"),
    ),
    Row(
        "tasks_judged",
        C,
        "Tasks that were judged by POST /v1/outcomes.",
        ("dimension", "name", "outcome"),
    ),
    Row(
        "cost_per_success_usd",
        G,
        "Cost of judged tasks, retries included, for each that succeeded.",
        ("dimension", "name"),
    ),
    Row("engine_restarts", C, "Times the engine was started again."),
    Row("task_failures", C, "Times a long-lived task failed and was started again.", ("task",)),
    Row(
        "engines",
        G,
        "Engines that are ready, by what the server sends there: prompts, answers, or both.",
        ("role",),
        known=("both", "prefill", "decode"),
    ),
    Row(
        "engines_asked",
        G,
        "Engines that the traffic of late asks for, at the pace that the default class promises.",
        ("kind",),
        known=("prefill", "decode"),
    ),
    Row(
        "kv_handovers",
        C,
        "Requests that left the engine of their prompt, by what came of it.",
        ("outcome",),
        known=("taken", "refused", "stayed", "lost"),
    ),
    Row(
        "kv_handover_seconds",
        H,
        "From the first token in one engine to the next one in another.",
        buckets=TTFT_BUCKETS_S,
    ),
)


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; the last count is of what exceeds all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value; a bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: np.ndarray) -> None:
        """Count many values at once."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + int(new) for count, new in zip(self.counts, found, strict=True)]
        self.sum += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """[(bound, values at most that), …, ("+Inf", all)]."""
        pairs, total = [], 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            pairs.append((str(bound), float(total)))
        return pairs


class Registry:
    """Every metric of one served model: `values[name][labels]` and `histograms[name]`."""

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
        self._steps = {0: BEFORE_ANY}
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Count `amount` more of a counter."""
        values = self.values[name]
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge; None takes the sample away."""
        if value is None:
            self.values[name].pop(labels, None)
        else:
            self.values[name][labels] = value

    def show_steps(self, records: dict[int, StepRecord]) -> None:
        """Set every gauge that shows a field of the last step, by engine."""
        self._steps = records

    def observe(self, name: str, value: float | None) -> None:
        """Count a value of a histogram; None is nothing."""
        if value is not None:
            self.histograms[name].observe(value)

    def expect(self, name: str, *labels: str) -> None:
        """Serve the series of these labels as 0 until something is counted there."""
        self._known[name].append(labels)

    def counts(self, name: str) -> dict[str, int]:
        """A counter of one label as {label: count}."""
        return {labels[0]: int(value) for labels, value in self.values[name].items()}

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for."""
        for row in ROWS:
            if row.vllm and self.prefix == "vllm":
                yield self._family(row, row.vllm, row.help)
                continue
            yield self._family(row, row.name, row.help)
            if row.vllm:
                help = f"Old name of {row.name}, until version {LAST_WITH_OLD_NAMES}. {row.help}"
                yield self._family(row, row.vllm, help)

    def _family(self, row: Row, name: str, help: str) -> Metric:
        """One metric with its samples, under `name`."""
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
        """The text that `/metrics` serves."""
        return generate_latest(self._collectors)
