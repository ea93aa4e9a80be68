"""What the doctor knows of a server: one flat reading, whoever told it.

`from_stats`, `from_metrics` and `from_report` fill it; rules read nothing else. None is "not known
from this source", never zero. Seconds, bytes and tokens; means unless a name says otherwise.
"""

from dataclasses import dataclass, field

from headway.core.contention import CoreUse
from headway.telemetry.snapshot import Percentiles, Utilization, Verdict
from headway.telemetry.verdict import CONTENTION

NO_VALUES = Percentiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStream:
    """A request whose tokens leave more slowly than the engine made them.

    Over `seconds` it could have sent `made` tokens and sent `left`.
    """

    id: str
    age_s: float
    seconds: float
    made: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One server over one window. `source` is stats, metrics or report."""

    source: str
    subject: str
    server: str = ""
    seconds: float = 0.0
    not_known: tuple[str, ...] = ()

    # requests
    num_ended: int = 0
    num_failed: int = 0
    arrivals_per_s: float | None = None
    finished_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    waiting_growth: float | None = None
    """Sequences waiting at the end less those at the beginning."""
    over_saturated: bool | None = None
    """What a load generator saw: concurrency and TTFT kept growing."""
    waiting_ages_s: tuple[float, ...] = ()
    """How long those have waited that wait now."""
    slow_streams: tuple[SlowStream, ...] = ()

    # latencies and lengths of requests that ended
    ttft: Percentiles = field(default_factory=Percentiles)
    tpot: Percentiles = field(default_factory=Percentiles)
    itl: Percentiles = field(default_factory=Percentiles)
    e2e: Percentiles = field(default_factory=Percentiles)
    queue: Percentiles = field(default_factory=Percentiles)
    prefill: Percentiles = field(default_factory=Percentiles)
    transfer_s: float | None = None
    prompt: Percentiles = field(default_factory=Percentiles)
    output: Percentiles = field(default_factory=Percentiles)
    short_prompt: float | None = None
    """A quarter of the prompts, or the half of them, is no longer than this."""
    longest_prompt: float | None = None
    """Of the requests that ended or are under way."""

    # steps
    idle_share: float | None = None
    host_share: float | None = None
    """Of the time with work: gaps and everything in a step but the model."""
    decode_steps: Utilization | None = None
    prefill_steps: Utilization | None = None
    cores: CoreUse | None = None
    """Who used the cores."""
    rows: float | None = None
    """Sequences in a step."""
    prefill_tokens_per_step: float | None = None
    """Of steps with prefill."""
    verdict: Verdict | None = None
    """The server's own."""

    # KV and cache
    kv_usage_max: float | None = None
    num_preemptions: int | None = None
    kv_tokens: int | None = None
    """How many tokens the KV blocks hold."""
    cache_hit_rate: float | None = None
    shared_tokens: float | None = None
    """Tokens with which a mean prompt begins like others; known from a report."""
    shared_said: str = ""

    # model, machine, limits
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bandwidth: float | None = None
    flops: float | None = None
    cache_resident: bool = False
    dtype: str = ""
    step_weight_bytes: float | None = None
    weight_choices: dict[str, int] = field(default_factory=dict)
    """Option → `step_weight_bytes` with it, of those that this server can be started with."""
    kv_choices: dict[str, int] = field(default_factory=dict)
    """Option → `kv_bytes_per_token` with it."""
    kv_bytes_per_token: float | None = None
    flops_per_token: float | None = None

    # faults
    validation_failures: int = 0
    refused: int = 0
    num_retries: int = 0
    num_restarts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    client_bottleneck: str = ""
    """Why the load generator, and not the server, set the pace; "" when it did not."""

    # money
    price_per_hour: float | None = None
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None

    # ── what a mean request spends its time on ──────────────────────────────────────────────

    @property
    def queue_s(self) -> float | None:
        """Of those that ended and of those that still wait: 1 s of ten and 11 s of ten are 6 s."""
        count, ages = self.queue.count, self.waiting_ages_s
        if not count and not ages:
            return None
        return ((self.queue.mean or 0.0) * count + sum(ages)) / (count + len(ages))

    @property
    def prefill_s(self) -> float | None:
        """First scheduled to first token."""
        return self.prefill.mean

    @property
    def decode_s(self) -> float | None:
        """First token to last: TPOT · (n − 1)."""
        if self.tpot.mean is None or self.output.mean is None:
            return None
        return self.tpot.mean * max(self.output.mean - 1, 0.0)

    @property
    def decode_share(self) -> float:
        """Of a mean request's time; of the time in steps where no request has ended yet."""
        if self.decode_s is not None:
            return self.share_of_request(self.decode_s)
        return 1 - self.prefill_time_share if self.decode_steps else 0.0

    @property
    def request_s(self) -> float | None:
        """All of it: queue, prefill and decode; the e2e latency where the parts are not known."""
        if self.queue_s is None:
            return self.e2e.mean
        return self.queue_s + (self.prefill_s or 0.0) + (self.decode_s or 0.0)

    def share_of_request(self, seconds: float | None) -> float:
        """The part of a mean request that `seconds` are, 0 … 1; 0 where either is unknown."""
        whole = self.request_s
        return min(max(seconds / whole, 0.0), 1.0) if seconds and whole else 0.0

    def share_of_ttft(self, seconds: float | None) -> float:
        """The part of the time to the first token; those that still wait count as waiting."""
        whole = self.ttft.mean
        if self.queue_s is not None:
            whole = self.queue_s + (self.prefill_s or 0.0)
        return min(seconds / whole, 1.0) if seconds and whole else 0.0

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    @property
    def decode_step_s(self) -> float | None:
        """A step without prefill."""
        return per_step(self.decode_steps)

    @property
    def prefill_step_s(self) -> float | None:
        """A step with prefill."""
        return per_step(self.prefill_steps)

    @property
    def prefill_time_share(self) -> float:
        """Of the time in steps, that of steps with prefill."""
        prefill = self.prefill_steps.time_s if self.prefill_steps else 0.0
        decode = self.decode_steps.time_s if self.decode_steps else 0.0
        return prefill / (prefill + decode) if prefill else 0.0

    @property
    def main_steps(self) -> Utilization | None:
        """The kind of steps that took the larger part of the time."""
        return self.prefill_steps if self.prefill_time_share > 0.5 else self.decode_steps

    @property
    def roofline(self) -> float | None:
        """Of the main steps: the least time the ceilings allow over the time they took."""
        return self.main_steps.roofline if self.main_steps else None

    @property
    def kind(self) -> str:
        """The server's verdict, "" where it gives none."""
        return self.verdict.kind if self.verdict else ""

    @property
    def contended(self) -> bool:
        """Others use the cores, as the server's own verdict has it."""
        return self.kind == CONTENTION

    @property
    def loaded(self) -> bool:
        """Not idle for the larger part, as far as is known."""
        return self.idle_share is None or self.idle_share <= 0.5


def per_step(steps: Utilization | None) -> float | None:
    """Seconds a step."""
    return steps.time_s / steps.num_steps if steps and steps.num_steps else None
