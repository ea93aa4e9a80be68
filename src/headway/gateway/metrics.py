"""Counters and gauges of the gateway, in the text format of Prometheus."""

from collections.abc import Iterable
from dataclasses import dataclass, field

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FAMILIES = {
    "requests": ("counter", "Requests that have ended, by route and status."),
    "attempts": ("counter", "Attempts at upstreams, by upstream and outcome."),
    "resumed": ("counter", "Streams that another upstream resumed, by how: exact or text."),
    "tokens": ("counter", "Tokens relayed, by route and kind: prompt, cached or output."),
    "dollars": ("counter", "Dollars spent on attempts, by upstream."),
    "refused": ("counter", "Requests that the gateway refused, by code."),
    "usage_refused": (
        "counter",
        "Answers whose reported usage was impossible, by upstream: it was estimated.",
    ),
    "retries_denied": ("counter", "Attempts that the retry budget did not allow."),
    "client_retries": ("counter", "Requests that a client library repeated."),
    "upstream_up": ("gauge", "1 where an upstream may get requests, by upstream."),
    "upstream_in_flight": ("gauge", "Requests in flight at an upstream."),
    "upstream_queue_seconds": ("gauge", "Expected seconds until an upstream begins a new request."),
    "task_dollars": ("counter", "Dollars of tasks, by dimension (all, key, task, route) and name."),
    "tasks": ("counter", "Tasks that were judged, by dimension, name and outcome."),
    "cost_per_success": ("gauge", "Dollars of judged tasks per successful task."),
    "cascade": (
        "counter",
        "Requests of cascades by route, task and outcome: accepted, rejected, failed or dear.",
    ),
    "drift_alarm": ("gauge", "1 where an upstream differs from another, or from itself before."),
    "drift_nats": ("gauge", "Nats per token between two upstreams of a model."),
    "held": (
        "counter",
        "Of routes with hold-back: answers, pieces published, stopped, not scored in time.",
    ),
    "time_to_publish_seconds": ("counter", "Seconds that published pieces waited, by route."),
    "rollout_share": ("gauge", "The canary's share of its model's requests, by rollout."),
    "rollout_evidence": ("gauge", "Evidence that the canary is worse, by rollout and guard."),
    "task_failures": (
        "counter",
        "Failures and restarts of a long-lived task of the process, by task.",
    ),
    "ledger_lost_rows": ("counter", "Rows that could not be written to the ledger."),
}
Labels = tuple[tuple[str, str], ...]
MAX_SERIES, OTHER = 10_000, "other"
"""Maximum series of a metric, because labels contain codes of upstreams and names of clients."""


@dataclass(slots=True)
class Metrics:
    """Values of counters by name and labels."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    ttft: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    ttft_sum: float = 0.0

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Add `amount` to a counter."""
        assert name in FAMILIES, name
        series = self.values.setdefault(name, {})
        key = tuple(labels.items())
        if key not in series and len(series) >= MAX_SERIES:
            key = tuple((label, OTHER) for label in labels)
        series[key] = series.get(key, 0.0) + amount

    def of(self, name: str, /, **labels: str) -> float:
        """Return the sum of the series with these labels."""
        pairs = labels.items()
        series = self.values.get(name, {})
        return sum(value for key, value in series.items() if pairs <= dict(key).items())

    def first_token(self, seconds: float) -> None:
        """Observe the time to first token of a stream."""
        number = sum(seconds > bound for bound in TTFT_BUCKETS_S)
        self.ttft[number] += 1
        self.ttft_sum += seconds

    def render(self, more: Iterable[tuple[str, Labels, float]]) -> bytes:
        """Return the text of `/metrics`; `more` are (name, labels, value) of gauges."""
        families = {name: dict(series) for name, series in self.values.items()}
        for name, labels, value in more:
            families.setdefault(name, {})[labels] = value
        lines = []
        for name, (kind, help) in FAMILIES.items():
            full = f"headway_gateway:{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
            lines += [
                f"{full}{format_labels(key)} {value}"
                for key, value in families.get(name, {}).items()
            ]
        return "\n".join([*lines, *self._histogram(), ""]).encode()

    def _histogram(self) -> list[str]:
        name = "headway_gateway:time_to_first_token_seconds"
        lines = [f"# HELP {name} From a request to its first token.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*TTFT_BUCKETS_S, "+Inf"), self.ttft, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.ttft_sum}", f"{name}_count {total}"]


@dataclass(slots=True)
class Refusals:
    """Requests that were answered with an error since the start, by key and code."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, key: str, code: str) -> None:
        """Count one; beyond `MAX_SERIES` pairs they are counted together."""
        place = (key, code)
        if place not in self.counts and len(self.counts) >= MAX_SERIES:
            place = (OTHER, OTHER)
        self.counts[place] = self.counts.get(place, 0) + 1

    def rows(self, owner: str | None) -> list[dict[str, object]]:
        """Return the counts of a key, or all for None."""
        return [
            {"key": key, "code": code, "requests": count}
            for (key, code), count in self.counts.items()
            if owner in (None, key)
        ]


def format_labels(labels: Labels) -> str:
    r"""Format labels as {a="b"}, with special characters escape_label."""
    if not labels:
        return ""
    parts = [f'{name}="{escape_label(value)}"' for name, value in labels]
    return "{" + ",".join(parts) + "}"


def escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
