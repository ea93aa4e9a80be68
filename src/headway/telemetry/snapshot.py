"""Answer of `GET /stats`: one served model, now and over the last 10, 60 and 300 seconds.

Every figure is derived from raw timestamps and step records at the time of reading. None (JSON
null) means "not measured here", never zero. docs/telemetry.md lists the fields: fields may be
added, never renamed.
"""

import msgspec

from headway.perf.roofline import Utilization
from headway.telemetry.contention import CoreUse
from headway.telemetry.prefixes import PrefixSharing

WINDOWS_S = (10, 60, 300)


class Percentiles(msgspec.Struct, kw_only=True):
    """Distribution of a latency in seconds or a length in tokens; None when `count` is 0."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @property
    def quantiles(self) -> tuple[tuple[str, float | None], ...]:
        """Return (label, value) of the median and of p95, with Prometheus' labels."""
        return ("0.5", self.p50), ("0.95", self.p95)


class ModelFacts(msgspec.Struct, kw_only=True):
    """The served model. `dtype` is the type in which the engine runs weights and activations.

    `weight_choices` and `kv_choices` map options with which this server could be started to the
    resulting `step_weight_bytes` and `kv_bytes_per_token`.
    """

    names: list[str]
    architecture: str
    dtype: str
    num_parameters: int
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    step_weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    weight_choices: dict[str, int] = {}
    kv_choices: dict[str, int] = {}


class MachineCeilings(msgspec.Struct, kw_only=True):
    """Ceilings of the machine: the best of all probes, and the data sheet's where known.

    `flops_dtype` is the type in which the kernels multiply. `raised` counts how often a measured
    utilization above 1 raised a ceiling. `cache_resident`: the weights are smaller than twice the
    last-level cache, so memory bandwidth does not bound decoding.
    """

    device: str
    name: str
    bandwidth_bytes_per_s: float | None
    flops_per_s: float | None
    flops_dtype: str
    datasheet_bandwidth_bytes_per_s: float | None
    datasheet_flops_per_s: float | None
    cache_bytes: int
    cache_resident: bool
    num_probes: int
    raised: int


class EngineLimits(msgspec.Struct, kw_only=True):
    """Limits with which the engine was started."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


class LiveRequest(msgspec.Struct, kw_only=True):
    """One live HTTP request. `state` is waiting, prefill, decode or preempted.

    Tokens are summed over its prompts and sequences; `computed_tokens` counts KV in place.
    """

    id: str
    service_class: str = msgspec.field(name="class")
    age_s: float
    state: str
    num_sequences: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    ttft_s: float | None
    num_preemptions: int


class KVGroup(msgspec.Struct, kw_only=True):
    """Blocks of one KV group; `window` is 0 for full attention.

    Kind `open` has the newest blocks of each sequence, which the KV format has not quantized yet.
    In kind `state` a sequence takes one block of `block_bytes`, whatever its length; else 0.
    """

    kind: str
    window: int
    num_layers: int
    bytes_per_token: int
    block_bytes: int = 0
    blocks_used: int
    blocks_total: int


class Now(msgspec.Struct, kw_only=True):
    """State at this moment. `num_running` and `num_waiting` count sequences in the engine.

    `requests` has at most 512 entries, oldest first; `num_requests` counts all. `engine_demand` is
    the number of engines that the recent traffic needs for (prefill, decode).
    """

    num_running: int
    num_waiting: int
    num_requests: int
    requests: list[LiveRequest]
    kv_usage: float
    kv_groups: list[KVGroup]
    engine_demand: tuple[float, float] = msgspec.field(default=(0.0, 0.0), name="engines_asked")


class EngineNow(msgspec.Struct, kw_only=True):
    """State of one engine at this moment; `role` is `prefill`, `decode` or `both`."""

    engine: int
    role: str = "both"
    ready: bool
    num_running: int
    num_waiting: int
    kv_usage: float


class ClassWindow(msgspec.Struct, kw_only=True):
    """One service class over one window; `why` is the source of its objectives.

    `num_judged` requests count for the SLO: ended ones that succeeded, failed, were refused for
    load, or disconnected after an objective was missed. `attainment` = met / judged;
    `remaining_budget` = 1 − misses / allowed misses (negative when overspent); `burn_rate` = share
    missed / share allowed: 1 spends exactly the budget.
    """

    name: str
    objectives: str
    why: str = ""
    num_judged: int
    num_met: int
    missed: dict[str, int]
    goodput_per_s: float
    token_goodput_per_s: float
    attainment: float | None
    remaining_budget: float | None = msgspec.field(name="budget_left")
    burn_rate: float | None
    latency: dict[str, Percentiles]


class StepMeans(msgspec.Struct, kw_only=True):
    """Means over the steps of a window: seconds, tokens and rows per step."""

    duration_s: float
    schedule_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    update_s: float
    other_s: float
    tokens: float
    prefill_tokens: float
    decode_tokens: float
    running: float
    waiting: float


class StepStats(msgspec.Struct, kw_only=True):
    """Shares of the window's wall time: busy in steps, in gaps with work waiting, idle.

    `cost_error` is |predicted / observed seconds − 1| of each step, predicted before it ran.
    """

    count: int
    busy_share: float
    gap_share: float
    idle_share: float
    kv_usage_mean: float
    kv_usage_max: float
    num_preemptions: int
    num_prefill_steps: int
    duration: Percentiles
    mean: StepMeans | None
    cost_error: Percentiles = msgspec.field(default_factory=Percentiles)


class VerdictEvidence(msgspec.Struct, kw_only=True):
    """One figure on which a verdict is based, and its threshold."""

    name: str
    value: float
    threshold: float
    text: str


class Verdict(msgspec.Struct, kw_only=True):
    """`kind` is contention, compute, bandwidth, capacity, host, under-loaded or unknown.

    `near_ceiling` is true where the ceiling itself is reached, so that only less work or another
    machine helps; false where that side only dominates and the kernels leave headroom.
    """

    kind: str
    text: str
    near_ceiling: bool
    evidence: list[VerdictEvidence]


class Cost(msgspec.Struct, kw_only=True):
    """Cost of a window at `--price-per-hour`, idle time included; docs/telemetry.md has the split.

    `usd_per_million_input` is the price of computed prompt tokens, `…_cached` that of cached ones,
    which is the share `--cached-price` of it. `usd_per_million_tokens` divides the whole cost by
    the output tokens alone.
    """

    usd: float
    usd_per_million_input: float | None
    usd_per_million_cached: float | None
    usd_per_million_output: float | None
    usd_per_million_tokens: float | None
    usd_per_request: float | None
    usd_per_met_request: float | None


class SourceDrafts(msgspec.Struct, kw_only=True):
    """Counts of one proposer: verified drafts, their tokens, and the accepted ones."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftStats(msgspec.Struct, kw_only=True):
    """Figures of speculative decoding over a window.

    `drafts`, `draft_tokens` and `accepted_tokens` count verified drafts; `acceptance` = accepted /
    draft tokens. `jump_forward_tokens` were forced by a grammar, neither drafted nor sampled.

    A decoding sequence has `drafts_per_step` draft tokens in a mean step and gains
    `tokens_per_step` = 1 + drafts_per_step · acceptance + forced tokens. Of the time in steps,
    drafting takes `draft_share`; verifying and computing forced tokens takes `verify_share`, by
    the step model. `speedup` = tokens_per_step · (1 − both shares), of steps without prefill.
    `failure` is the reason why the draft model or heads are disabled, "" where they are not.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None
    drafts_per_step: float | None
    tokens_per_step: float | None
    draft_share: float | None
    verify_share: float | None
    speedup: float | None
    by_source: dict[str, SourceDrafts]
    jump_forward_tokens: int = 0
    failure: str = ""


class WindowStats(msgspec.Struct, kw_only=True):
    """Figures of the last `seconds`; `covered_s` is less right after a start.

    Rates are per covered second. `latency` has ttft, tpot, itl, e2e, queue and prefill of requests
    that ended in the window (itl: of tokens sent in it); `lengths` has prompt and output in tokens.
    `input_tokens_per_s` counts prompts whose first token was sent, cached tokens included;
    `output_tokens_per_s` counts sent tokens. `cache_saved_s` is the predicted time of computing the
    cached tokens. `cores` is None without /proc, `drafts` None without speculation.
    """

    seconds: int
    covered_s: float
    arrivals_per_s: float
    finished_per_s: float
    num_failed: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    cache_hit_rate: float | None
    cache_saved_s: float
    goodput_per_s: float
    latency: dict[str, Percentiles]
    lengths: dict[str, Percentiles]
    classes: list[ClassWindow]
    steps: StepStats
    decode: Utilization | None
    prefill: Utilization | None
    all_steps: Utilization | None
    verdict: Verdict
    cost: Cost | None
    cores: CoreUse | None = None
    drafts: DraftStats | None = None


class StepPoint(msgspec.Struct, array_like=True):
    """One step of the timeline, a list in this order; `start_s` is on the clock of `now_s`."""

    step: int
    start_s: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    kv_usage: float
    predicted_s: float = 0.0


class HistoryPoint(msgspec.Struct, array_like=True):
    """One second of the charts, a list in this order; it ends at `at_s` on the clock of `now_s`.

    Tokens are those of that second; sequences and blocks are means over its steps; latencies (s)
    are of the requests that ended in the 10 seconds up to it, None without such requests.
    """

    at_s: float
    output_tokens: int
    input_tokens: int
    num_running: float
    num_waiting: float
    kv_usage: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None


class Totals(msgspec.Struct, kw_only=True):
    """Counts since the server started.

    `errors` counts refused and failed requests by code, `finished` sequences by finish reason,
    `validation_failures` by kind: `request` for a body, a kind of grammar (`json` …) for an answer
    that ended before its grammar was satisfied, `tool_arguments` for a tool call.
    """

    requests: int
    finished: dict[str, int]
    errors: dict[str, int]
    validation_failures: dict[str, int]
    admission_rejections: dict[str, int]
    client_retries: int
    preemptions: int
    engine_restarts: int
    handovers: dict[str, int] = {}
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    cache_saved_s: float
    slo_met: int
    slo_missed: int
    usd: float


class TaskCost(msgspec.Struct, kw_only=True):
    """Cost of one group of tasks: all of them, or those of a key, a class or a route.

    `usd` is the cost of every request. `usd_per_success` is the cost of the tasks judged by POST
    /v1/outcomes, retries included, per successful task; None before the first success.
    """

    dimension: str
    name: str
    requests: int
    usd: float
    succeeded: int
    failed: int
    usd_per_success: float | None


class Snapshot(msgspec.Struct, kw_only=True):
    """The whole answer. `time_s` is seconds since 1970, `now_s` the clock of `steps[].start_s`.

    `steps` are the last 200; `windows` are in the order of `WINDOWS_S`. `settings` are those that
    change the cost of a step or the choice of its sequences. `tasks` are the most expensive groups,
    of all models together. `history` has a point per second if requested.
    """

    version: str
    time_s: float
    now_s: float
    uptime_s: float
    status: str
    model: ModelFacts
    machine: MachineCeilings
    kernels: dict[str, tuple[str, str]]
    limits: EngineLimits
    slo_target: float
    price_per_hour: float | None
    now: Now
    engines: list[EngineNow] = []
    windows: list[WindowStats]
    steps: list[StepPoint]
    totals: Totals
    prefixes: list[PrefixSharing] = []
    tasks: list[TaskCost] = []
    settings: dict[str, str] = {}
    history: list[HistoryPoint] = []
