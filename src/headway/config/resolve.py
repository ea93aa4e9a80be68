"""From options, the machine and the model to final settings, with a reason for each derived value.

`resolve` is pure: same arguments, same answer; nothing writes back into options. Bytes and blocks
are planned in `config.memory_plan`.
"""

from dataclasses import dataclass, replace
from operator import attrgetter

from headway.config.attention_choice import (
    OWN_KERNELS,
    check_less,
    choose_attention,
    choose_kv_dtype,
)
from headway.config.cache_config import DEFAULT_BLOCK_SIZE, CacheConfig
from headway.config.device_choice import choose_graphs, choose_overlap, yes_no
from headway.config.drafter import DrafterPlan, plan_drafter
from headway.config.kv_disk import plan_disk
from headway.config.kv_keep import keep_share
from headway.config.kv_read import read_share
from headway.config.kv_states import checkpoint_blocks, refuse_unread
from headway.config.memory_plan import (
    bytes_of_blocks,
    gib,
    kv_budget,
    plan_activations,
    plan_blocks,
    plan_host_blocks,
    plan_weights,
    with_open_blocks,
)
from headway.config.options import EngineOptions
from headway.config.parallel import Parallel, check_context_shards, choose_parallel, held_by_all
from headway.config.quantization_choice import choose_quantization, experts_at_once
from headway.config.reasons import Reason, Reasons
from headway.config.scheduler_config import BatchingRule, SchedulerConfig, parse_batching
from headway.config.speculation_config import DraftHead, SpeculationConfig, choose_method
from headway.core.errors import UsageError
from headway.core.machine import Machine
from headway.spec import ModelSpec, RopeSpec
from headway.spec.context_shards import shard_kv_groups
from headway.spec.kv_format import kv_format
from headway.spec.quantization import Quantization

POLICIES = {
    "slo": "as many requests as possible within their objectives, none starves",
    "fair": "the user who had least, by weight, goes first",
    "priority": "the smallest priority goes first, then who came first",
    "fcfs": "who came first goes first",
}
CPU_MAX_NUM_SEQS, CUDA_MAX_NUM_SEQS = 64, 256
"""Sequences in a step. 256 is vLLM's default; a CPU is near its ceiling from 16 on (lab log), and
64 serve more users at once."""
CPU_BATCHED_TOKENS, CUDA_BATCHED_TOKENS = 512, 4096
"""Tokens in a step. On a CPU a longer step gains little and every decode waits for it; the figure
for CUDA is an estimate."""
SMALL_MODEL_BYTES = 32 * 2**20
"""Below it a second thread mostly waits (lab log, two threads on a small model)."""

STATS_SETTINGS = {
    "device": "device",
    "dtype": "dtype",
    "kv_dtype": "cache.dtype",
    "quantization": "quantization",
    "kernels": "kernels",
    "attention_backend": "attention_backend",
    "threads": "threads",
    "prefix_cache": "cache.prefix_cache",
    "kv_read": "cache.read",
    "kv_keep": "cache.kept_share",
    "tensor_parallel_size": "parallel.size",
    "pipeline_parallel_size": "parallel.stages_text",
    "decode_context_parallel_size": "parallel.context",
    "batching": "scheduler.batching",
    "policy": "scheduler.policy",
    "speculate": "speculation.source_names",
    "max_drafts": "speculation.num_speculative_tokens",
}
"""Settings that change what a step costs and what runs in it: name in `/stats` → attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine and the runtime run with; every value is final."""

    device: str
    dtype: str
    load_format: str
    attention_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheConfig
    threads: int
    seed: int
    kernels: str = "torch"
    quantization: Quantization = Quantization()
    pack_weights: bool = False
    graphs: bool = False
    step_bytes: int = 0
    weight_cache_bytes: int = 0
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: Parallel = Parallel()
    rope: RopeSpec | None = None
    """The rope whose frequencies follow from a request's lengths."""

    def to_stats(self) -> dict[str, str]:
        """Those that change what a step costs and who runs in it, for `/stats`, as text."""
        return {name: str(attrgetter(path)(self)) for name, path in STATS_SETTINGS.items()}


def resolve(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    draft: ModelSpec | None = None,
    draft_head: DraftHead | None = None,
    activations: int | None = None,
) -> tuple[Settings, list[Reason]]:
    """Return the settings and the reason of each; raises CapacityError or UsageError.

    `draft` is that of a draft model; `draft_head` is the drafter in the model's own folder.
    `activations` are the bytes of a GPU that steps take, as counted with these settings.
    """
    reasons = Reasons()
    refuse_unread(options, model)
    step = choose_step(options, machine, model, reasons)
    options = replace(options, block_size=step.block_size)
    unit = step.quantization.unit
    parallel, threads = choose_parallel(
        options, machine, model, step.device, unit, step.threads, reasons
    )
    check_context_shards(parallel, step.backend, step.kv_dtype, step.block_size)
    model = held_by_all(model, parallel, unit)
    if options.kv_keep:
        draft_head = None  # it is never asked for draft tokens
    weights = plan_all_weights(options, machine, model, draft, draft_head, step, reasons)
    step_bytes = reasons.choose("step_bytes", plan_activations(step.device, activations), shown=gib)
    cache, max_model_len = plan_cache(
        options, machine, model, step, parallel, weights, step_bytes, reasons
    )
    settings = Settings(
        device=step.device,
        dtype=step.dtype,
        load_format=options.load_format,
        attention_backend=step.backend,
        max_model_len=max_model_len,
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        cache=cache,
        threads=threads,
        seed=options.seed,
        kernels=step.kernels,
        quantization=step.quantization,
        pack_weights=weights.are_packed,
        graphs=step.graphs,
        step_bytes=step_bytes,
        weight_cache_bytes=weights.cache_bytes,
        scheduler=replace(SchedulerConfig.of(options), overlap=step.overlap),
        speculation=choose_speculation(options, model, weights.drafter, draft_head, reasons),
        parallel=parallel,
        rope=model.length_rope,
    )
    return settings, reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """How a step is computed: where, in which types, by which kernels, and its maximum size."""

    device: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    overlap: int
    threads: int
    kernels: str
    backend: str
    kv_dtype: str
    block_size: int
    quantization: Quantization
    graphs: bool


def choose_step(
    options: EngineOptions, machine: Machine, model: ModelSpec, reasons: Reasons
) -> StepChoice:
    """Return how a step is computed; raises UsageError for options that exclude each other."""
    device = reasons.choose("device", choose_device(options, machine))
    dtype = reasons.choose("dtype", choose_dtype(options, model))
    max_num_seqs, batched = choose_step_size(options, device, reasons)
    chosen = choose_threads(options, machine, model, dtype)
    overlap = reasons.choose("overlap", choose_overlap(options, device, model, chosen[0]))
    reasons.choose("policy", (options.policy, POLICIES[options.policy]))
    threads = reasons.choose("threads", chosen)
    kernels = reasons.choose("kernels", choose_kernels(options, machine, device))
    backend = reasons.choose(
        "attention_backend",
        choose_attention(options, kernels, device, model, dtype, machine.accelerator),
    )
    kv_dtype, block_size = choose_kv(options, model, device, dtype, backend, reasons)
    quantization = reasons.choose(
        "quantization", choose_quantization(options, device, kernels, model)
    )
    at_once = experts_at_once(quantization, kernels, model)
    graphs = reasons.choose(
        "graphs", choose_graphs(options, device, backend, model, at_once), shown=yes_no
    )
    return StepChoice(
        device=device,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        overlap=overlap,
        threads=threads,
        kernels=kernels,
        backend=backend,
        kv_dtype=kv_dtype,
        block_size=block_size,
        quantization=quantization,
        graphs=graphs,
    )


def choose_kv(
    options: EngineOptions,
    model: ModelSpec,
    device: str,
    dtype: str,
    backend: str,
    reasons: Reasons,
) -> tuple[str, int]:
    """Return the type of keys and values, and the tokens of a block."""
    kv_dtype = reasons.choose("kv_dtype", choose_kv_dtype(options, backend, dtype, model))
    check_less(options, backend, kv_dtype)
    block_size = reasons.choose("block_size", choose_block_size(options, kv_dtype))
    if kv_format(kv_dtype).block_size and device != "cpu":
        raise UsageError(
            f"--kv-cache-dtype {kv_dtype} is not there on {device} yet.",
            "Use --device cpu, or --kv-cache-dtype auto.",
        )
    return kv_dtype, block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlan:
    """Bytes of the weights of a model and its drafter, and how they are held.

    `num_bytes` is without the drafter's; `cache_bytes` of disk keep them for the next start.
    """

    num_bytes: int
    are_packed: bool
    cache_bytes: int
    drafter: DrafterPlan


def plan_all_weights(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    draft: ModelSpec | None,
    draft_head: DraftHead | None,
    step: StepChoice,
    reasons: Reasons,
) -> WeightsPlan:
    """Return the plan of the weights of the model and its drafter."""
    how = step.device, step.dtype, step.kernels, step.quantization
    are_packed, num_bytes = plan_weights(machine, model, *how, reasons)
    cache = choose_cache(options, step.kernels, step.quantization, num_bytes)
    cache_bytes = reasons.choose("weight_cache_bytes", cache, shown=gib)
    drafter = plan_drafter(options, machine, model, draft, draft_head, *how, reasons)
    return WeightsPlan(
        num_bytes=num_bytes, are_packed=are_packed, cache_bytes=cache_bytes, drafter=drafter
    )


def plan_cache(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    step: StepChoice,
    parallel: Parallel,
    weights: WeightsPlan,
    step_bytes: int,
    reasons: Reasons,
) -> tuple[CacheConfig, int]:
    """Return the KV cache in the memory that weights and steps leave, and the longest context."""
    kv_dtype, block_size = step.kv_dtype, step.block_size
    weight_bytes = weights.num_bytes * parallel.context + weights.drafter.num_bytes
    budget = reasons.choose(
        "kv_memory", kv_budget(options, machine, weight_bytes, step.device, step_bytes), shown=gib
    )
    groups = shard_kv_groups(weights.drafter.groups, parallel.context)
    groups = with_open_blocks(groups, model, step.dtype, kv_dtype)
    num_blocks, max_model_len = plan_blocks(
        options,
        model,
        groups,
        kv_dtype,
        budget,
        step.max_num_seqs,
        step.max_num_batched_tokens,
        reasons,
    )
    in_use = 0 if step.device == "cuda" else weight_bytes + budget
    host_blocks, block_bytes = plan_host_blocks(
        options, machine, groups, kv_dtype, num_blocks, in_use, reasons
    )
    choose_prefix_cache(options, model, max_model_len, reasons)
    disk_folder, disk_bytes, disk_write_bytes_s = plan_disk(options, reasons)
    held = shard_kv_groups(model.kv_groups, parallel.context)
    cache = CacheConfig(
        num_blocks=num_blocks,
        windows=tuple(group.window for group in held),
        sinks=tuple(group.sinks for group in held),
        ranks=parallel.context,
        bounded=tuple(bool(layer.bounds) for layer in model.layers) if options.kv_read else (),
        read=read_share(options.kv_read),
        chooses=tuple(layer.chooses for layer in model.layers) if options.kv_keep else (),
        choosing=tuple(i for i, group in enumerate(model.kv_groups) if group.chooses),
        keep=keep_share(options.kv_keep),
        state_every=checkpoint_blocks(model, kv_dtype, block_size),
        block_size=block_size,
        open_blocks=bool(kv_format(kv_dtype).block_size),
        dtype=kv_dtype,
        prefix_cache=options.prefix_cache_policy if options.prefix_cache else "",
        attention_cost=attention_cost(model),
        host_blocks=host_blocks,
        block_bytes=block_bytes or bytes_of_blocks(groups, kv_dtype, block_size),
        disk_folder=disk_folder,
        disk_bytes=disk_bytes,
        disk_write_bytes_s=disk_write_bytes_s,
    )
    return cache, max_model_len


def choose_speculation(
    options: EngineOptions,
    model: ModelSpec,
    drafter: DrafterPlan,
    draft_head: DraftHead | None,
    reasons: Reasons,
) -> SpeculationConfig:
    """Return the proposers and the maximum number of draft tokens."""
    is_off, why = speculation_reason(options, model)
    if is_off:
        options = replace(options, speculative_method="off")
    config = SpeculationConfig.of(
        options, drafter.group, drafter.share, draft_head, drafter.vocab_size
    )
    reasons.choose(
        "speculative_method", (config.methods, why), shown=lambda s: ", ".join(s) or "off"
    )
    return config


def speculation_reason(options: EngineOptions, model: ModelSpec) -> tuple[bool, str]:
    """Return (whether `auto` is off for this model, the reason of the method)."""
    method = choose_method(options)
    if method == "auto" and options.kv_keep:
        return True, "draft tokens are not verified yet behind a prompt of which a part is kept"
    if method == "auto" and model.states is not None:
        return True, "states of sequences do not go back behind a rejected draft token yet"
    whys = {"auto": "what costs little and pays where it is used", "off": "the default"}
    return False, whys.get(method, "given")


def choose_step_size(options: EngineOptions, device: str, reasons: Reasons) -> tuple[int, int]:
    """(sequences, tokens) of a step at most: given, or the device's; the rule of batching too."""
    default = CUDA_MAX_NUM_SEQS if device == "cuda" else CPU_MAX_NUM_SEQS
    default = min(default, options.max_num_batched_tokens or default)
    why = f"the default on {device}, at most max_num_batched_tokens"
    max_num_seqs = reasons.choose("max_num_seqs", given_or(options.max_num_seqs, default, why))
    default = max(CUDA_BATCHED_TOKENS if device == "cuda" else CPU_BATCHED_TOKENS, max_num_seqs)
    why = f"the default on {device}, never below max_num_seqs so that every decode fits in a step"
    batched, why = given_or(options.max_num_batched_tokens, default, why)
    if batched < max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens ({batched}) is smaller than max_num_seqs ({max_num_seqs}).",
            "Raise the first or lower the second: each running sequence needs a token a step.",
        )
    reasons.choose("max_num_batched_tokens", (batched, why))
    rule = parse_batching(options.batching)
    reasons.choose("batching", (rule.name, explain_batching(rule, max_num_seqs)))
    return max_num_seqs, batched


def choose_prefix_cache(
    options: EngineOptions, model: ModelSpec, max_model_len: int, reasons: Reasons
) -> None:
    """Note whether blocks are kept, and how much dearer those behind a long context are."""
    kept = "what was computed stays in free blocks until others need them"
    choice = (options.prefix_cache_policy, kept) if options.prefix_cache else ("no", "given")
    reasons.choose("prefix_cache", choice)
    cost = attention_cost(model)
    dearer = 1 + cost * max_model_len
    why = f"the last token of {max_model_len} takes {dearer:.3g} times the first's FLOPs"
    reasons.choose("attention_cost", (cost, why), shown=lambda cost: f"{cost:.2g}")


def attention_cost(model: ModelSpec) -> float:
    """What a token of context adds to the FLOPs of one token: 1.2e-4 of them for Qwen2.5-0.5B.

    There a token behind 8,192 others takes twice what the first does.
    """
    far = model.max_len
    alone = model.flops(1, num_sampled=0)
    return (model.flops(1, far, num_sampled=0) - alone) / (far * alone)


def given_or(given: int | None, default: int, why: str) -> tuple[int, str]:
    """(the user's value, "given") or (the default, why)."""
    return (given, "given") if given is not None else (default, why)


def explain_batching(rule: BatchingRule, max_num_seqs: int) -> str:
    """When a request starts under the rule of batching, and who may wait for ever."""
    window_ms = rule.window_s * 1000
    return {
        "continuous": "requests start when there is room, at any step",
        "dynamic": f"given: {max_num_seqs} requests start together, or fewer after "
        f"{window_ms:g} ms; the next when all have ended",
        "static": f"given: {max_num_seqs} requests start together, the next when all have ended; "
        f"WARNING: fewer than {max_num_seqs} wait until more come or the server drains",
    }[rule.name]


def choose_threads(
    options: EngineOptions, machine: Machine, model: ModelSpec, dtype: str
) -> tuple[int, str]:
    """All cores, but one for a model so small that waking a second costs more than it computes."""
    if options.threads is None and model.weight_bytes(dtype) < SMALL_MODEL_BYTES:
        return 1, f"the weights are below {gib(SMALL_MODEL_BYTES)}: a second thread would only wait"
    return given_or(options.threads, machine.num_cores, "the cores this process may use")


def choose_device(options: EngineOptions, machine: Machine) -> tuple[str, str]:
    """cuda when there is one and the user did not say cpu."""
    if options.device == "auto":
        if machine.accelerator:
            return "cuda", f"{machine.accelerator.name} is there"
        return "cpu", "there is no CUDA device"
    if options.device == "cuda" and machine.accelerator is None:
        raise UsageError(
            "--device cuda: this machine shows no CUDA device.",
            "Use --device cpu, or check the driver with nvidia-smi.",
        )
    return options.device, "given"


def choose_dtype(options: EngineOptions, model: ModelSpec) -> tuple[str, str]:
    """The checkpoint's own type unless the user names another."""
    if options.dtype == "auto":
        return model.dtype, "the checkpoint's own type"
    return options.dtype, "given"


def choose_kernels(options: EngineOptions, machine: Machine, device: str) -> tuple[str, str]:
    """native on a CPU and cuda on a GPU, where they run, unless the user says torch."""
    if options.kernels == "native" and device != "cpu":
        raise UsageError(
            f"--kernels native: they are a CPU's, not {device}'s.",
            "Use --device cpu, or --kernels auto.",
        )
    if device != "cpu":
        return choose_device_kernels(options, machine)
    if options.kernels in OWN_KERNELS:
        raise UsageError(
            f"--kernels {options.kernels}: they are a GPU's, and the device is cpu.",
            "Use --device cuda, or --kernels auto.",
        )
    if options.kernels == "native" and not machine.native:
        raise UsageError(
            f"--kernels native: {machine.native_why}.", "Use --kernels auto, or install again."
        )
    if options.kernels != "auto":
        return options.kernels, "given"
    return "native" if machine.native else "torch", machine.native_why


def choose_device_kernels(options: EngineOptions, machine: Machine) -> tuple[str, str]:
    """cuda, our own kernels in Triton, where they run there; else torch's."""
    accelerator = machine.accelerator
    if accelerator is None:
        return "torch", "there is no CUDA device"
    if options.kernels in OWN_KERNELS and not accelerator.has_kernels:
        raise UsageError(
            f"--kernels {options.kernels}: {accelerator.kernels_why}.",
            "Use --kernels auto, which says torch.",
        )
    if options.kernels != "auto":
        return options.kernels, "given"
    return "cuda" if accelerator.has_kernels else "torch", accelerator.kernels_why


def choose_cache(
    options: EngineOptions, kernels: str, quantization: Quantization, weights: int
) -> tuple[int, str]:
    """Bytes of disk for weights in the form that the kernels read; 0 where that saves nothing."""
    if not quantization.rounded or options.load_format == "dummy":
        return 0, "nothing is rounded that a later start could read"
    if kernels != "native":
        return 0, "weights rounded by torch are not kept"
    if weights < SMALL_MODEL_BYTES:
        return 0, f"weights below {gib(SMALL_MODEL_BYTES)} are rounded at once"
    return int(options.weight_cache), "of rounded weights on disk, for the next start"


def choose_block_size(options: EngineOptions, kv_dtype: str) -> tuple[int, str]:
    """Tokens of a block: given, or the format's own, which no other may replace."""
    own = kv_format(kv_dtype).block_size
    if own and options.block_size not in (None, own):
        raise UsageError(
            f"--block-size {options.block_size}: KV of {kv_dtype} is rounded in blocks of {own}.",
            f"Use --block-size {own}, or leave it out.",
        )
    if own:
        return own, f"KV of {kv_dtype} is rounded in blocks of so many tokens"
    return given_or(options.block_size, DEFAULT_BLOCK_SIZE, "the default")
