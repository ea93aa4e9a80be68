"""All figures that the doctor's rules read, in parts by subject, from whatever source.

`from_stats`, `from_metrics` and `from_report` fill the parts that their source has; rules read
nothing else. None means "not known from this source", never zero. Values are means unless the name
says otherwise.

    load, client       arrivals, running and waiting requests; slow clients
    latency, lengths   times and tokens of the requests that ended
    steps, limits      times of the engine's steps, and the limits of one step
    machine, weights   ceilings, and the bytes of the model that a step reads
    kv, prefix         blocks, and hits of the prefix cache
    faults, spend      failures; dollars
"""

from dataclasses import dataclass, field

from headway.perf.roofline import DecodeStep, Utilization
from headway.telemetry.contention import CoreUse
from headway.telemetry.snapshot import Percentiles, Verdict
from headway.telemetry.verdict import CONTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """Requests a second, and running and waiting sequences.

    `waiting_growth` is the number of waiting sequences at the end less that at the beginning,
    `waiting_ages_s` the waiting time so far of each waiting request. `over_saturated` is the load
    generator's finding that concurrency and TTFT kept growing. `in_slo` is the share of the judged
    requests that met their objectives.
    """

    num_ended: int = 0
    arrivals_per_s: float | None = None
    finished_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    waiting_growth: float | None = None
    waiting_ages_s: tuple[float, ...] = ()
    over_saturated: bool | None = None
    in_slo: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStream:
    """A request whose tokens are sent more slowly than the engine generates them.

    Over `seconds` the engine generated `generated` tokens and the server sent `sent`.
    """

    id: str
    age_s: float
    seconds: float
    generated: int
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReading:
    """Slow clients.

    `bottleneck` is the reason why the load generator, and not the server, set the pace; "" when it
    did not.
    """

    slow_streams: tuple[SlowStream, ...] = ()
    bottleneck: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReading:
    """Seconds of the requests that ended; `transfer_s` is the round trip to the client."""

    ttft: Percentiles = field(default_factory=Percentiles)
    tpot: Percentiles = field(default_factory=Percentiles)
    itl: Percentiles = field(default_factory=Percentiles)
    e2e: Percentiles = field(default_factory=Percentiles)
    queue: Percentiles = field(default_factory=Percentiles)
    prefill: Percentiles = field(default_factory=Percentiles)
    transfer_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReading:
    """Tokens of the requests that ended.

    `short_prompt` is the 25th percentile of the prompts, or the median; `longest_prompt` includes
    the requests in flight.
    """

    prompt: Percentiles = field(default_factory=Percentiles)
    output: Percentiles = field(default_factory=Percentiles)
    short_prompt: float | None = None
    longest_prompt: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """Shares of wall time, and the steps with and without prefill.

    `host_share` is the share of busy time outside the model. `rows` is the number of sequences in a
    step, `prefill_tokens` the prompt tokens of a step that has any.
    """

    idle_share: float | None = None
    host_share: float | None = None
    decode: Utilization | None = None
    prefill: Utilization | None = None
    rows: float | None = None
    prefill_tokens: float | None = None

    @property
    def decode_step_s(self) -> float | None:
        """Return the seconds of a step without prefill."""
        return per_step(self.decode)

    @property
    def prefill_step_s(self) -> float | None:
        """Return the seconds of a step with prefill."""
        return per_step(self.prefill)

    @property
    def prefill_share(self) -> float:
        """Return the share of the time in steps that steps with prefill take."""
        prefill = self.prefill.time_s if self.prefill else 0.0
        decode = self.decode.time_s if self.decode else 0.0
        return prefill / (prefill + decode) if prefill else 0.0

    @property
    def main(self) -> Utilization | None:
        """Return the kind of steps that took the larger part of the time."""
        return self.prefill if self.prefill_share > 0.5 else self.decode

    @property
    def main_step_s(self) -> float | None:
        """Return the seconds of a step of the main kind."""
        return per_step(self.main)

    @property
    def roofline(self) -> float | None:
        """Return the least time that the ceilings allow over the observed time, of the main
        steps."""
        return self.main.roofline if self.main else None

    @property
    def loaded(self) -> bool:
        """Return whether the engine is busy for at least half of the time, as far as is known."""
        return self.idle_share is None or self.idle_share <= 0.5


def per_step(steps: Utilization | None) -> float | None:
    """Return the seconds of a mean step."""
    return steps.time_s / steps.num_steps if steps and steps.num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReading:
    """The limits of one step: sequences, and tokens."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """The measured ceilings in bytes and FLOPs a second, and the use of the cores.

    `device` is cpu or cuda, "" where it is not known.
    """

    device: str = ""
    bandwidth: float | None = None
    flops: float | None = None
    cores: CoreUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReading:
    """Bytes of weights that a step reads; `choices` maps an option to these bytes with it.

    The choices are options that this server can be started with. `cache_resident`: the CPU's cache
    holds the weights, so memory does not bound decoding.
    """

    step_bytes: float | None = None
    choices: dict[str, int] = field(default_factory=dict)
    cache_resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReading:
    """The KV blocks: their highest use, 0 to 1, and the number of tokens that they hold.

    `choices` maps an option that this server can be started with to the bytes per token with it.
    """

    usage_max: float | None = None
    num_preemptions: int | None = None
    num_tokens: int | None = None
    bytes_per_token: float | None = None
    choices: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReading:
    """Share of prompt tokens found in the cache, and tokens of a mean prompt that were sent before.

    `shared_text` describes the prefix that saves most.
    """

    hit_rate: float | None = None
    shared_tokens: float | None = None
    shared_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReading:
    """Results of speculation; `sources` names the proposers and is empty where speculation is off.

    Of a decoding sequence, `per_step` draft tokens are proposed in a mean step, the share
    `acceptance` is accepted, and `tokens_per_step` tokens are gained. `cost_share` is the share of
    step time that drafting and verifying take, `speedup` the tokens a second over those of steps
    without draft tokens. Grammars forced `forced` tokens; `failure` is the reason why the drafter
    is not used.
    """

    sources: tuple[str, ...] = ()
    acceptance: float | None = None
    per_step: float | None = None
    tokens_per_step: float | None = None
    cost_share: float | None = None
    speedup: float | None = None
    acceptance_by_source: dict[str, float] = field(default_factory=dict)
    forced: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReading:
    """Number of failures in the window; `errors` by code."""

    num_failed: int = 0
    validation_failures: int = 0
    refused: int = 0
    num_retries: int = 0
    num_restarts: int = 0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendReading:
    """Dollars an hour of the machine, and dollars per million tokens."""

    price_per_hour: float | None = None
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReading:
    """One server over one window of `seconds`. `source` is stats, metrics or report.

    `verdict` is the server's own. Figures that need several parts are properties here.
    """

    source: str
    subject: str
    server: str = ""
    seconds: float = 0.0
    not_known: tuple[str, ...] = ()
    load: LoadReading = LoadReading()
    client: ClientReading = ClientReading()
    latency: LatencyReading = LatencyReading()
    lengths: LengthReading = LengthReading()
    steps: StepReading = StepReading()
    limits: LimitReading = LimitReading()
    machine: MachineReading = MachineReading()
    weights: WeightReading = WeightReading()
    kv: KVReading = KVReading()
    prefix: PrefixReading = PrefixReading()
    drafts: DraftReading = DraftReading()
    faults: FaultReading = FaultReading()
    spend: SpendReading = SpendReading()
    verdict: Verdict | None = None

    @property
    def contended(self) -> bool:
        """Return whether other processes use the cores, by the server's own verdict."""
        return self.verdict is not None and self.verdict.kind == CONTENTION

    # ── what a mean request spends its time on ──────────────────────────────────────────────

    @property
    def queue_s(self) -> float | None:
        """Return the mean waiting time of ended and waiting requests: 1 s of ten and 11 s of ten
        give 6 s."""
        queue, ages = self.latency.queue, self.load.waiting_ages_s
        if not queue.count and not ages:
            return None
        return ((queue.mean or 0.0) * queue.count + sum(ages)) / (queue.count + len(ages))

    @property
    def prefill_s(self) -> float | None:
        """Return the seconds from the first scheduling to the first token."""
        return self.latency.prefill.mean

    @property
    def decode_s(self) -> float | None:
        """Return the seconds from the first token to the last: TPOT · (n − 1)."""
        tpot_s, length = self.latency.tpot.mean, self.lengths.output.mean
        if tpot_s is None or length is None:
            return None
        return tpot_s * max(length - 1, 0.0)

    @property
    def decode_share(self) -> float:
        """Return decode's share of a mean request; of the time in steps where no request has ended
        yet."""
        if self.decode_s is not None:
            return self.share_of_request(self.decode_s)
        return 1 - self.steps.prefill_share if self.steps.decode else 0.0

    @property
    def request_s(self) -> float | None:
        """Return the seconds of queue, prefill and decode; the e2e latency where the parts are not
        known."""
        if self.queue_s is None:
            return self.latency.e2e.mean
        return self.queue_s + (self.prefill_s or 0.0) + (self.decode_s or 0.0)

    def share_of_request(self, seconds: float | None) -> float:
        """Return `seconds` as a share of a mean request, 0 to 1; 0 where either is unknown."""
        whole = self.request_s
        return min(max(seconds / whole, 0.0), 1.0) if seconds and whole else 0.0

    def share_of_ttft(self, seconds: float | None) -> float:
        """Return `seconds` as a share of the time to the first token, waiting requests included."""
        whole = self.latency.ttft.mean
        if self.queue_s is not None:
            whole = self.queue_s + (self.prefill_s or 0.0)
        return min(seconds / whole, 1.0) if seconds and whole else 0.0


def decode_step(reading: ServerReading) -> DecodeStep | None:
    """Return the mean decode step; None where the source has none or the weights stay in the cache.

    A bandwidth that steps reached is a lower bound of the machine's ceiling, also where the ceiling
    was measured lower.
    """
    steps, seconds = reading.steps.decode, reading.steps.decode_step_s
    weights, machine = reading.weights.step_bytes, reading.machine
    if steps is None or not seconds or not weights or not machine.bandwidth:
        return None
    if reading.weights.cache_resident:
        return None
    rows = max(reading.steps.rows or 1.0, 1.0)
    kv = max(steps.bytes_per_s * seconds - weights, 0.0)
    return DecodeStep(
        seconds=seconds,
        rows=rows,
        weight_bytes=weights,
        kv_bytes_per_row=kv / rows,
        flops_per_row=steps.flops_per_s * seconds / rows,
        bandwidth=max(machine.bandwidth, steps.bytes_per_s),
        flops=max(machine.flops, steps.flops_per_s) if machine.flops else None,
    )
