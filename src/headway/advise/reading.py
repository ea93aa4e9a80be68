"""What the doctor knows of a server, in parts by subject, whoever told it.

`from_stats`, `from_metrics` and `from_report` fill the parts that they know; rules read nothing
else. None is "not known from this source", never zero. Means unless a name says otherwise.

    load, client       what arrives and waits; who reads or sends too slowly
    latency, lengths   times and tokens of the requests that ended
    steps, limits      what the engine's steps took, and how much one may hold
    machine, weights   ceilings, and what a step reads of the model
    kv, prefix         blocks, and what the prefix cache found
    faults, spend      what failed; dollars
"""

from dataclasses import dataclass, field

from headway.perf.roofline import DecodeStep, Utilization
from headway.telemetry.contention import CoreUse
from headway.telemetry.snapshot import Percentiles, Verdict
from headway.telemetry.verdict import CONTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """Requests a second, and sequences that run and wait.

    `waiting_growth` is those that wait at the end less those at the beginning, `waiting_ages_s` how
    many seconds those have waited that wait now. `over_saturated` is what a load generator saw:
    concurrency and TTFT kept growing. `in_slo` is the share of those with objectives that met them.
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
    """A request whose tokens leave more slowly than the engine made them.

    Over `seconds` it could have sent `made` tokens and sent `left`.
    """

    id: str
    age_s: float
    seconds: float
    made: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReading:
    """Who is slow outside the server.

    `bottleneck` says why the load generator, and not the server, set the pace; "" when it did not.
    """

    slow_streams: tuple[SlowStream, ...] = ()
    bottleneck: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReading:
    """Seconds of the requests that ended; `transfer_s` is the way to the client and back."""

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

    A quarter of the prompts, or the half of them, is no longer than `short_prompt`;
    `longest_prompt` is of those that ended or are under way.
    """

    prompt: Percentiles = field(default_factory=Percentiles)
    output: Percentiles = field(default_factory=Percentiles)
    short_prompt: float | None = None
    longest_prompt: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """Shares of wall time, and the steps with and without prefill.

    `host_share` is of the time with work: gaps and everything in a step but the model. `rows` are
    sequences in a step, `prefill_tokens` prompt tokens in a step that has any.
    """

    idle_share: float | None = None
    host_share: float | None = None
    decode: Utilization | None = None
    prefill: Utilization | None = None
    rows: float | None = None
    prefill_tokens: float | None = None

    @property
    def decode_step_s(self) -> float | None:
        """A step without prefill."""
        return per_step(self.decode)

    @property
    def prefill_step_s(self) -> float | None:
        """A step with prefill."""
        return per_step(self.prefill)

    @property
    def prefill_share(self) -> float:
        """Of the time in steps, that of steps with prefill."""
        prefill = self.prefill.time_s if self.prefill else 0.0
        decode = self.decode.time_s if self.decode else 0.0
        return prefill / (prefill + decode) if prefill else 0.0

    @property
    def main(self) -> Utilization | None:
        """The kind of steps that took the larger part of the time."""
        return self.prefill if self.prefill_share > 0.5 else self.decode

    @property
    def main_step_s(self) -> float | None:
        """A step of that kind."""
        return per_step(self.main)

    @property
    def roofline(self) -> float | None:
        """Of the main steps: the least time the ceilings allow over the time they took."""
        return self.main.roofline if self.main else None

    @property
    def loaded(self) -> bool:
        """Not idle for the larger part, as far as is known."""
        return self.idle_share is None or self.idle_share <= 0.5


def per_step(steps: Utilization | None) -> float | None:
    """Seconds a step."""
    return steps.time_s / steps.num_steps if steps and steps.num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReading:
    """What one step may hold: sequences, and tokens."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """The measured ceilings, bytes and FLOPs a second, and who used the cores.

    `device` is cpu or cuda, "" where it is not known.
    """

    device: str = ""
    bandwidth: float | None = None
    flops: float | None = None
    cores: CoreUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReading:
    """Bytes of weights that a step reads; `choices` are options and the bytes with each.

    The choices are those that this server can be started with. `cache_resident`: the CPU's cache
    holds the weights, and memory does not bound decoding.
    """

    step_bytes: float | None = None
    choices: dict[str, int] = field(default_factory=dict)
    cache_resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReading:
    """The KV blocks: their use at the fullest, 0 to 1, and the tokens that they hold.

    `bytes_per_token` is of KV; `choices` are options and those bytes with each, of the options that
    this server can be started with.
    """

    usage_max: float | None = None
    num_preemptions: int | None = None
    num_tokens: int | None = None
    bytes_per_token: float | None = None
    choices: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReading:
    """Share of prompt tokens that the cache had, and tokens of a mean prompt that were sent before.

    `shared_said` tells of the prefix that saves most, in words.
    """

    hit_rate: float | None = None
    shared_tokens: float | None = None
    shared_said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReading:
    """What speculation brings: `sources` is empty where nobody guesses.

    Of a sequence that decodes `per_step` tokens are guessed in a mean step, the share `acceptance`
    of them comes, and `tokens_per_step` in all. `price` is what drafting and verifying take of the
    time of steps, `speedup` the tokens a second over those without. `kept` is the acceptance by
    source. Grammars forced `forced` tokens; `failure` says why the drafter
    is not asked.
    """

    sources: tuple[str, ...] = ()
    acceptance: float | None = None
    per_step: float | None = None
    tokens_per_step: float | None = None
    price: float | None = None
    speedup: float | None = None
    kept: dict[str, float] = field(default_factory=dict)
    forced: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReading:
    """How often it happened in the window; `errors` by code."""

    num_failed: int = 0
    validation_failures: int = 0
    refused: int = 0
    num_retries: int = 0
    num_restarts: int = 0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendReading:
    """Dollars an hour of the machine, and dollars a million tokens."""

    price_per_hour: float | None = None
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One server over one window of `seconds`. `source` is stats, metrics or report.

    `verdict` is the server's own. What needs several parts is computed here.
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
        """Others use the cores, as the server's own verdict has it."""
        return self.verdict is not None and self.verdict.kind == CONTENTION

    # ── what a mean request spends its time on ──────────────────────────────────────────────

    @property
    def queue_s(self) -> float | None:
        """Of those that ended and of those that still wait: 1 s of ten and 11 s of ten are 6 s."""
        queue, ages = self.latency.queue, self.load.waiting_ages_s
        if not queue.count and not ages:
            return None
        return ((queue.mean or 0.0) * queue.count + sum(ages)) / (queue.count + len(ages))

    @property
    def prefill_s(self) -> float | None:
        """First scheduled to first token."""
        return self.latency.prefill.mean

    @property
    def decode_s(self) -> float | None:
        """First token to last: TPOT · (n − 1)."""
        tpot_s, length = self.latency.tpot.mean, self.lengths.output.mean
        if tpot_s is None or length is None:
            return None
        return tpot_s * max(length - 1, 0.0)

    @property
    def decode_share(self) -> float:
        """Of a mean request's time; of the time in steps where no request has ended yet."""
        if self.decode_s is not None:
            return self.share_of_request(self.decode_s)
        return 1 - self.steps.prefill_share if self.steps.decode else 0.0

    @property
    def request_s(self) -> float | None:
        """All of it: queue, prefill and decode; the e2e latency where the parts are not known."""
        if self.queue_s is None:
            return self.latency.e2e.mean
        return self.queue_s + (self.prefill_s or 0.0) + (self.decode_s or 0.0)

    def share_of_request(self, seconds: float | None) -> float:
        """The part of a mean request that `seconds` are, 0 … 1; 0 where either is unknown."""
        whole = self.request_s
        return min(max(seconds / whole, 0.0), 1.0) if seconds and whole else 0.0

    def share_of_ttft(self, seconds: float | None) -> float:
        """The part of the time to the first token; those that still wait count as waiting."""
        whole = self.latency.ttft.mean
        if self.queue_s is not None:
            whole = self.queue_s + (self.prefill_s or 0.0)
        return min(seconds / whole, 1.0) if seconds and whole else 0.0


def decode_step(reading: Reading) -> DecodeStep | None:
    """The mean decode step; None where the source does not tell or the weights stay in cache.

    What steps reach the machine can do: a ceiling that was measured lower was measured in a bad
    moment.
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
