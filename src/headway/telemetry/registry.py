"""The metric registry: vLLM's names under our prefix, in Prometheus' text format.

It lives in the server process. Step records feed the gauges, request timelines the histograms, so
the engine pays nothing for it. `render` gives what `/metrics` serves.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from headway.telemetry.records import StepRecord

PREFIX = "headway:"
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
E2E_BUCKETS_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
STEP_TOKEN_BUCKETS = tuple(float(2**i) for i in range(15))


class Registry:
    """Every metric of one served model."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as vLLM's: no `_created` line beside each counter
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self.running = self._gauge("num_requests_running", "Sequences that advance in steps.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a place.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.preemptions = self._counter("num_preemptions", "Sequences sent back to the queue.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.restarts = self._counter("engine_restarts", "Times the engine was started again.")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "First token leaves − request arrived.", TTFT_BUCKETS_S
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Gap between tokens of a request.", ITL_BUCKETS_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Last token − request arrived.", E2E_BUCKETS_S
        )
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BUCKETS
        )
        self._success = Counter(
            PREFIX + "request_success",
            "Requests finished, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._seen_preemptions = 0

    def _gauge(self, name: str, help: str) -> Gauge:
        gauge = Gauge(PREFIX + name, help, list(self._labels), registry=self._registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(PREFIX + name, help, list(self._labels), registry=self._registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, help, list(self._labels), registry=self._registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def on_step(self, record: StepRecord) -> None:
        """Take one step record."""
        self.running.set(record.num_running)
        self.waiting.set(record.num_waiting)
        self.kv_usage.set(record.kv_usage)
        self.step_tokens.observe(record.num_tokens)
        new = record.num_preemptions - self._seen_preemptions
        self.preemptions.inc(max(new, 0))  # a restarted engine counts from 0 again
        self._seen_preemptions = record.num_preemptions

    def on_death(self) -> None:
        """The engine is gone, and with it all that ran, waited or held a block."""
        for gauge in (self.running, self.waiting, self.kv_usage):
            gauge.set(0)
        self._seen_preemptions = 0

    def on_finish(self, reason: str) -> None:
        """Count one finished sequence by its reason."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(self) -> bytes:
        """The text that `/metrics` serves."""
        return generate_latest(self._registry)
