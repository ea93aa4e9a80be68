"""What `GET /stats` answers: one served model, now and over the last 10, 60 and 300 seconds.

Every figure is derived from raw timestamps and step records when it is asked for. None (JSON null)
means "not measured here", never zero. docs/telemetry.md explains them: add some, rename none.
"""

import msgspec

from headway.perf.roofline import Utilization
from headway.telemetry.contention import CoreUse
from headway.telemetry.shared import PrefixSharing

WINDOWS_S = (10, 60, 300)


class Percentiles(msgspec.Struct, kw_only=True):
    """Of one latency in seconds, or one length in tokens; all None when `count` is 0."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @property
    def quantiles(self) -> tuple[tuple[str, float | None], ...]:
        """(label, value) as Prometheus writes quantiles: of the middle and of the tail."""
        return ("0.5", self.p50), ("0.95", self.p95)


class ModelFacts(msgspec.Struct, kw_only=True):
    """What is served. `dtype` is that of weights and activations as the engine runs them.

    `weight_choices` and `kv_choices` are options that this server could be started with, and what
    `step_weight_bytes` and `kv_bytes_per_token` would be then.
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


class Machine(msgspec.Struct, kw_only=True):
    """The ceilings: the best of all probes so far, and the datasheet's where it is known.

    `flops_dtype` is the type the kernels multiply in. `raised` counts how often a working ratio
    above 1 raised a ceiling. `cache_resident`: the weights are smaller than twice the last-level
    cache, so the memory's bandwidth does not bound decoding.
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


class Limits(msgspec.Struct, kw_only=True):
    """What the engine was started with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


class LiveRequest(msgspec.Struct, kw_only=True):
    """One HTTP request that is not over. `state` is waiting, prefill, decode or preempted.

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

    Kind `open` are the blocks that a format has not rounded yet, the newest of each sequence. Of
    kind `state` a block is what a sequence takes, `block_bytes`, whatever its length; else 0.
    """

    kind: str
    window: int
    num_layers: int
    bytes_per_token: int
    block_bytes: int = 0
    blocks_used: int
    blocks_total: int


class Now(msgspec.Struct, kw_only=True):
    """This moment. `num_running` and `num_waiting` count sequences in the engine.

    `requests` has at most 512 entries, oldest first; `num_requests` counts all. `engines_asked` are
    those that the traffic of late asks for prompts and for answers.
    """

    num_running: int
    num_waiting: int
    num_requests: int
    requests: list[LiveRequest]
    kv_usage: float
    kv_groups: list[KVGroup]
    engines_asked: tuple[float, float] = (0.0, 0.0)


class EngineNow(msgspec.Struct, kw_only=True):
    """One engine at this moment; `role` is `prefill`, `decode` or `both`."""

    engine: int
    role: str = "both"
    ready: bool
    num_running: int
    num_waiting: int
    kv_usage: float


class ClassWindow(msgspec.Struct, kw_only=True):
    """One service class over one window; `why` says where its objectives come from.

    `num_judged` requests count for the SLO: ended ones that succeeded, failed, were refused for
    load, or left after an objective was already missed. `attainment` = met / judged; `budget_left`
    = 1 − misses / allowed misses (negative when overspent); `burn_rate` = share missed / share
    allowed: 1 spends exactly the budget.
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
    budget_left: float | None
    burn_rate: float | None
    latency: dict[str, Percentiles]


class StepMeans(msgspec.Struct, kw_only=True):
    """Means over the steps of a window: seconds, tokens and rows a step."""

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

    `cost_error` is of |predicted / actual seconds − 1| of each step, predicted before it ran.
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


class Evidence(msgspec.Struct, kw_only=True):
    """One figure that a verdict stands on, and the threshold it was held against."""

    name: str
    value: float
    threshold: float
    text: str


class Verdict(msgspec.Struct, kw_only=True):
    """`kind` is contention, compute, bandwidth, capacity, host, under-loaded or unknown.

    `near_ceiling` is true where the ceiling itself is reached: faster needs less work or another
    machine; false where that side only dominates and the kernels leave some of it.
    """

    kind: str
    text: str
    near_ceiling: bool
    evidence: list[Evidence]


class Cost(msgspec.Struct, kw_only=True):
    """Money of a window at `--price-per-hour`: idle time included, split as docs/telemetry.md says.

    `usd_per_million_input` is of tokens that were computed, `…_cached` of those found in the prefix
    cache, at the share `--cached-price` of it. `usd_per_million_tokens` divides all spend by output
    tokens alone.
    """

    usd: float
    usd_per_million_input: float | None
    usd_per_million_cached: float | None
    usd_per_million_output: float | None
    usd_per_million_tokens: float | None
    usd_per_request: float | None
    usd_per_met_request: float | None


class SourceDrafts(msgspec.Struct, kw_only=True):
    """What one source guessed: drafts verified, their tokens, and those that were accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftStats(msgspec.Struct, kw_only=True):
    """What speculation brought. `drafts`, `draft_tokens` and `accepted_tokens` count what was
    verified; `acceptance` = accepted / draft tokens. `jump_forward_tokens` came because a grammar
    forced them: nobody guessed or sampled them.

    Of a sequence that decodes, `drafts_per_step` tokens are guessed in a mean step and
    `tokens_per_step` come: 1 + drafts_per_step · acceptance + what was forced. Of the time of
    steps, drafting takes `draft_share`, and verifying and computing forced tokens `verify_share`
    more than the same steps without, by the step cost.
    `speedup` = tokens_per_step · (1 − both shares), of the steps without prefill. `failure` says
    why the drafting model or heads are not asked now, "" where they are.
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


class Window(msgspec.Struct, kw_only=True):
    """The last `seconds`; `covered_s` is less right after a start. Rates are per covered second.

    `latency` has ttft, tpot, itl, e2e, queue and prefill, of requests that ended in the window
    (itl: of tokens that left in it); `lengths` has prompt and output, in tokens.
    `input_tokens_per_s` counts prompts whose first token left, cached tokens included;
    `output_tokens_per_s` tokens that left. `cache_saved_s` is what computing the cached ones would
    have taken. `cores` says who used the cores, None where the system does not tell; `drafts` is
    None where nobody guesses.
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
    """One step of the timeline, as a list in this order; `start_s` on the scale of `now_s`."""

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
    """One second of the charts, as a list in this order; it ends at `at_s` on the scale of `now_s`.

    Tokens are of that second, sequences and blocks means over its steps, latencies in seconds of
    the requests that ended in the 10 seconds up to it, None where none did.
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
    `validation_failures` what did not validate (`request`: a body; `json` and other kinds of
    grammars: answers that ended before their grammar was satisfied; `tool_arguments`).
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
    """What one group of tasks has cost: all of them, or those of a key, a class or a route.

    `usd` is of every request; `usd_per_success` of the tasks that POST /v1/outcomes has judged,
    retries in them, for each that succeeded; None before one has.
    """

    dimension: str
    name: str
    requests: int
    usd: float
    succeeded: int
    failed: int
    usd_per_success: float | None


class Snapshot(msgspec.Struct, kw_only=True):
    """All of it. `time_s` is seconds since 1970, `now_s` the clock of `steps[].start_s`.

    `steps` are the last 200; `windows` are in the order of `WINDOWS_S`. `settings` are those that
    change what a step costs and who runs in it. `tasks` are the groups that cost most, of all
    models together. `history` has a point a second where asked for.
    """

    version: str
    time_s: float
    now_s: float
    uptime_s: float
    status: str
    model: ModelFacts
    machine: Machine
    kernels: dict[str, tuple[str, str]]
    limits: Limits
    slo_target: float
    price_per_hour: float | None
    now: Now
    engines: list[EngineNow] = []
    windows: list[Window]
    steps: list[StepPoint]
    totals: Totals
    prefixes: list[PrefixSharing] = []
    tasks: list[TaskCost] = []
    settings: dict[str, str] = {}
    history: list[HistoryPoint] = []
