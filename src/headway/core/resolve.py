"""From options, the machine and the model to final settings, with a reason for each derived value.

`resolve` is pure: same arguments, same answer; nothing writes back into options. Worked example,
Qwen2.5-0.5B in bf16 with 10 GiB free: weights 0.92 GiB, 40% of the rest is 3.63 GiB for KV, a
block of 16 tokens of 12 KiB is 192 KiB, so 19,834 blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headway.core.errors import CapacityError, UsageError
from headway.core.machine import Machine
from headway.core.model_spec import DTYPE_BYTES, KVGroupSpec, ModelSpec
from headway.core.options import Bytes, EngineOptions
from headway.core.quantization import GROUPS, Quantization, planned_bytes

DEFAULT_KV_SHARE = 0.4
DEFAULT_ATTENTION = "sdpa"
CPU_MAX_NUM_SEQS, CUDA_MAX_NUM_SEQS = 64, 256
CPU_BATCHED_TOKENS, CUDA_BATCHED_TOKENS = 512, 4096
SMALL_MODEL_BYTES = 32 * 2**20
PACKED_SHARE = 0.5
CUDA_ACTIVATION_BYTES = 2 * 2**30


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
    block_size: int
    num_blocks: tuple[int, ...]
    windows: tuple[int, ...]
    threads: int
    seed: int
    kv_dtype: str = ""
    kernels: str = "torch"
    quantization: Quantization = Quantization()
    pack_weights: bool = False
    batching: str = "continuous"
    batch_window_s: float = 0.05
    prefix_cache: str = "cost"
    """What goes first of the blocks that are kept; "" keeps none."""
    attention_cost: float = 0.0
    """What each token of context adds to computing one, as a share of all else it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one setting has its value, in words a user can check."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.why}"


def resolve(
    options: EngineOptions, machine: Machine, model: ModelSpec
) -> tuple[Settings, list[Reason]]:
    """The settings and the reason of each; raises CapacityError or UsageError."""
    reasons: list[Reason] = []

    def decide(name: str, value: object, why: str) -> None:
        reasons.append(Reason(name=name, value=str(value), why=why))

    device, why = choose_device(options, machine)
    decide("device", device, why)
    dtype, why = choose_dtype(options, model)
    decide("dtype", dtype, why)
    default_seqs = CUDA_MAX_NUM_SEQS if device == "cuda" else CPU_MAX_NUM_SEQS
    max_num_seqs, why = given_or(
        options.max_num_seqs,
        min(default_seqs, options.max_num_batched_tokens or default_seqs),
        f"the default on {device}, at most max_num_batched_tokens",
    )
    decide("max_num_seqs", max_num_seqs, why)
    batched, why = given_or(
        options.max_num_batched_tokens,
        max(CUDA_BATCHED_TOKENS if device == "cuda" else CPU_BATCHED_TOKENS, max_num_seqs),
        f"the default on {device}, never below max_num_seqs so that every decode fits in a step",
    )
    if batched < max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens ({batched}) is smaller than max_num_seqs ({max_num_seqs}).",
            "Raise the first or lower the second: each running sequence needs a token a step.",
        )
    decide("max_num_batched_tokens", batched, why)
    decide("batching", options.batching, explain_batching(options, max_num_seqs))
    threads, why = choose_threads(options, machine, model, dtype)
    decide("threads", threads, why)

    kernels, why = choose_kernels(options, machine, device)
    decide("kernels", kernels, why)
    backend, why = choose_attention(options, kernels, device)
    decide("attention_backend", backend, why)
    kv_dtype, why = choose_kv_dtype(options, backend, dtype)
    decide("kv_dtype", kv_dtype, why)
    quantization, why = choose_quantization(options, device, kernels)
    decide("quantization", quantization, why)
    if quantization.format != "none":
        pack_weights, why = False, "they are rounded"
        weights, weights_why = plan_rounded(machine, model, dtype, quantization)
    else:
        pack_weights, weights, why = plan_weights(machine, model, device, dtype, kernels)
        weights_why = f"{model.num_parameters:,} parameters of {dtype}"
    decide("pack_weights", "yes" if pack_weights else "no", why)
    decide("weights", gib(weights), weights_why)
    num_blocks, max_model_len = plan_memory(
        options, machine, model, device, kv_dtype, weights, max_num_seqs, batched, decide
    )
    kept = "what was computed stays in free blocks until others need them"
    decide(
        "prefix_cache",
        options.prefix_cache_policy if options.prefix_cache else "no",
        kept if options.prefix_cache else "given",
    )
    dearer = 1 + attention_cost(model) * max_model_len
    why = f"the last token of {max_model_len} takes {dearer:.3g} times the first's FLOPs"
    decide("attention_cost", f"{attention_cost(model):.2g}", why)
    settings = Settings(
        device=device,
        dtype=dtype,
        load_format=options.load_format,
        attention_backend=backend,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=options.block_size,
        num_blocks=num_blocks,
        windows=tuple(group.window for group in model.kv_groups),
        threads=threads,
        seed=options.seed,
        kv_dtype=kv_dtype,
        kernels=kernels,
        quantization=quantization,
        pack_weights=pack_weights,
        batching=options.batching,
        batch_window_s=options.batch_window,
        prefix_cache=options.prefix_cache_policy if options.prefix_cache else "",
        attention_cost=attention_cost(model),
    )
    return settings, reasons


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


def explain_batching(options: EngineOptions, max_num_seqs: int) -> str:
    """When a request starts under the rule of batching, and who may wait for ever."""
    window_ms = options.batch_window * 1000
    return {
        "continuous": "requests start when there is room, at any step",
        "dynamic": f"given: {max_num_seqs} requests start together, or fewer after "
        f"{window_ms:g} ms; the next when all have ended",
        "static": f"given: {max_num_seqs} requests start together, the next when all have ended; "
        f"WARNING: fewer than {max_num_seqs} wait until more come or the server drains",
    }[options.batching]


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
    """native on a CPU where they load, unless the user says torch."""
    if options.kernels == "native" and device != "cpu":
        raise UsageError(
            f"--kernels native: they are a CPU's, not {device}'s.",
            "Use --device cpu, or --kernels auto.",
        )
    if device != "cpu":
        return "torch", f"the native kernels are a CPU's, not {device}'s"
    if options.kernels == "native" and not machine.native:
        raise UsageError(
            f"--kernels native: {machine.native_why}.", "Use --kernels auto, or install again."
        )
    if options.kernels != "auto":
        return options.kernels, "given"
    return "native" if machine.native else "torch", machine.native_why


def choose_quantization(
    options: EngineOptions, device: str, kernels: str
) -> tuple[Quantization, str]:
    """What is asked for, where it is there: on a CPU, in groups of 32, 64 or 128."""
    if options.quantization_group not in GROUPS:
        raise UsageError(
            f"--quantization-group {options.quantization_group} is not one of {GROUPS}.",
            "Take 64, or 32 for a little more quality and 128 for a little less memory.",
        )
    if options.quantization != "none" and device != "cpu":
        raise UsageError(
            f"--quantization {options.quantization} is not there on {device} yet.",
            "Use --device cpu, or leave it out.",
        )
    why = "given" if options.quantization != "none" else "the checkpoint's weights as they are"
    packed = kernels == "native" or options.quantization != "int4"
    return Quantization(options.quantization, options.quantization_group, packed), why


def plan_rounded(
    machine: Machine, model: ModelSpec, dtype: str, quantization: Quantization
) -> tuple[int, str]:
    """(bytes of the weights once they are rounded, why); CapacityError where loading takes more."""
    plain = model.weight_bytes(dtype)
    if plain > machine.free_bytes:
        raise CapacityError(
            f"Weights are rounded after loading: {gib(plain)} of {dtype} on the way; "
            f"{gib(machine.free_bytes)} are free.",
            "Serve a smaller model, or free memory.",
        )
    why = f"{model.num_parameters:,} parameters, {quantization}; {gib(plain)} of {dtype} on the way"
    return planned_bytes(quantization, model, dtype), why


def choose_attention(options: EngineOptions, kernels: str, device: str) -> tuple[str, str]:
    """native where the kernels are, else torch's."""
    if options.attention_backend == "native" and kernels != "native":
        raise UsageError(
            "--attention-backend native: the native kernels are not used here.",
            "Use --attention-backend auto, and --dry-run to see why under kernels.",
        )
    if options.attention_backend != "auto":
        return options.attention_backend, "given"
    if kernels == "native":
        return "native", "it comes with the native kernels"
    return DEFAULT_ATTENTION, f"the faster one on {device}"


def choose_kv_dtype(options: EngineOptions, backend: str, dtype: str) -> tuple[str, str]:
    """The type of the model unless the user names another."""
    if options.kv_cache_dtype == "auto":
        return dtype, "the type of the model"
    if backend != "native":
        raise UsageError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: {backend} attention reads no such KV.",
            "Use --attention-backend native (on a CPU), or --kv-cache-dtype auto.",
        )
    return options.kv_cache_dtype, "given"


def plan_weights(
    machine: Machine, model: ModelSpec, device: str, dtype: str, kernels: str
) -> tuple[bool, int, str]:
    """(whether to pack the linear layers in fp32, bytes of all weights then, why).

    Native kernels pack every type as it is; a head tied to the embedding is packed beside it.
    Without them packing pays on a CPU for fp32, and for types the CPU does not multiply itself;
    those stay beside it, for one or two rows: Qwen2.5-0.5B in bf16 takes 0.92 GiB plain, 1.2 GiB
    in native kernels, 2.8 GiB so.
    """
    plain = model.weight_bytes(dtype)
    if device != "cpu":
        return False, plain, f"{device} multiplies them as they are"
    if kernels == "native":
        head = model.embedding_parameters * DTYPE_BYTES[dtype] if model.tied else 0
        return False, plain + head, f"the native kernels read {dtype} as it is"
    if dtype != "float32" and machine.multiplies(dtype):
        return False, plain, f"this CPU multiplies {dtype} itself"
    linear = model.num_parameters - (0 if model.tied else model.embedding_parameters)
    beside = model.embedding_parameters * DTYPE_BYTES[dtype] if dtype == "float32" else plain
    packed = linear * DTYPE_BYTES["float32"] + beside
    if packed > machine.free_bytes * PACKED_SHARE:
        return False, plain, f"in fp32 they would take {gib(packed)} of {gib(machine.free_bytes)}"
    return True, packed, f"fp32 products are the fastest here; {gib(plain)} if not"


def plan_memory(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    device: str,
    kv_dtype: str,
    weights: int,
    max_num_seqs: int,
    max_chunk: int,
    decide: Callable[[str, object, str], None],
) -> tuple[tuple[int, ...], int]:
    """(KV blocks by group, longest context): the memory plan, told through `decide`."""
    size, wanted_len = options.block_size, options.max_model_len or model.max_len
    groups = model.kv_groups
    block_bytes = [group.bytes_per_token(kv_dtype) * size for group in groups]
    budget, why = kv_budget(options, machine, weights, device)
    decide("kv_memory", gib(budget), why)
    if options.max_model_len and options.max_model_len > model.max_len:
        raise UsageError(
            f"max_model_len ({options.max_model_len}) is beyond what the model was made for.",
            f"config.json says max_position_embeddings = {model.max_len}.",
        )
    useful = [useful_blocks(group, size, wanted_len, max_num_seqs, max_chunk) for group in groups]
    counts = share_blocks(budget, useful, block_bytes)
    alone = [most_blocks(group, size, wanted_len, max_chunk) for group in groups]
    capacity = min(
        wanted_len if group.window and count >= most else count * size
        for group, count, most in zip(groups, counts, alone, strict=True)
    )
    if capacity < min(wanted_len, size):
        raise CapacityError(
            f"{gib(budget)} for KV does not hold one block of {gib(sum(block_bytes))}.",
            "Raise --kv-memory, or serve a smaller model.",
        )
    if options.max_model_len and capacity < options.max_model_len:
        one = sum(most * block for most, block in zip(alone, block_bytes, strict=True))
        raise CapacityError(
            f"One context of {options.max_model_len} tokens needs {gib(one)} of KV; "
            f"there are {gib(budget)}.",
            f"Lower --max-model-len to {capacity} or raise --kv-memory.",
        )
    limit = f"{gib(budget)} for KV"
    if counts == useful:
        limit = f"enough for {max_num_seqs} full contexts"
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        sees = f"a window of {group.window} tokens" if group.window else "full attention"
        where = f" in {len(group.layers)} layers of {sees}" if len(groups) > 1 else ""
        token_kib = group.bytes_per_token(kv_dtype) / 1024
        decide(
            f"kv_blocks_{index}" if len(groups) > 1 else "kv_blocks",
            count,
            f"{limit}, blocks of {size} tokens of {token_kib:g} KiB{where}; "
            f"holds {count * size:,} tokens",
        )
    max_model_len = min(wanted_len, capacity)
    if options.max_model_len:
        why = "given"
    elif max_model_len < model.max_len:
        why = f"what the KV blocks hold; the model allows {model.max_len}"
    else:
        why = "the model's max_position_embeddings"
    decide("max_model_len", max_model_len, why)
    return tuple(count + 1 for count in counts), max_model_len


def most_blocks(group: KVGroupSpec, block_size: int, length: int, max_chunk: int) -> int:
    """The most blocks one sequence of `length` tokens holds at once in this group.

    Blocks of 16: a context of 8,192 takes 512; with a window of 512 and chunks of 512 it takes 65.
    """
    whole = -(-length // block_size)
    if not group.window:
        return whole
    return min(whole, -(-(group.window - 1 + max_chunk) // block_size) + 1)


def useful_blocks(
    group: KVGroupSpec, block_size: int, length: int, max_num_seqs: int, max_chunk: int
) -> int:
    """Blocks that `max_num_seqs` sequences of `length` can fill; one step's chunks are shared."""
    each = most_blocks(group, block_size, length, 1)
    chunks = -(-max_chunk // block_size) if group.window else 0
    return min(max_num_seqs * each + chunks, max_num_seqs * -(-length // block_size))


def share_blocks(budget: int, useful: list[int], block_bytes: list[int]) -> list[int]:
    """As many blocks for each group, but none more than is useful; block 0 of each is paid first.

    1,000 bytes, blocks of 10 and 30 bytes: 24 of each; when 8 of the second are useful, the first
    gets 72. So a window group never fills before a full one does, and what it saves is theirs.
    """
    counts = [0] * len(useful)
    left, sizes = budget - sum(block_bytes), sum(block_bytes)
    for group in sorted(range(len(useful)), key=lambda group: useful[group]):
        counts[group] = max(0, min(useful[group], left // sizes))
        left -= counts[group] * block_bytes[group]
        sizes -= block_bytes[group]
    return counts


def kv_budget(
    options: EngineOptions, machine: Machine, weights: int, device: str
) -> tuple[int, str]:
    """(bytes for KV, why); raises CapacityError when the weights alone do not fit."""
    if device == "cuda":
        assert machine.accelerator is not None
        usable = int(machine.accelerator.total_bytes * options.gpu_memory_utilization)
        free = min(usable, machine.accelerator.free_bytes) - weights - CUDA_ACTIVATION_BYTES
        place = f"{options.gpu_memory_utilization:.0%} of the GPU less weights and activations"
    else:
        free = machine.free_bytes - weights
        place = f"the {gib(max(free, 0))} of RAM left free after the weights"
    if free <= 0:
        have = machine.accelerator.free_bytes if device == "cuda" else machine.free_bytes  # type: ignore[union-attr]
        raise CapacityError(
            f"The weights need {gib(weights)}; {gib(have)} are free.",
            "Serve a smaller model, or free memory.",
        )
    given = options.kv_memory
    if given is None:
        if device == "cuda":
            return free, place
        return int(free * DEFAULT_KV_SHARE), f"{DEFAULT_KV_SHARE:.0%} of {place}"
    share = Bytes(given).share
    if share is not None:
        return int(free * share), f"{share:.0%} of {place}, as given"
    if given > free:
        raise CapacityError(
            f"--kv-memory {gib(given)} is more than the {gib(free)} left after the weights.",
            "Lower --kv-memory.",
        )
    return int(given), "given"


def gib(num_bytes: float) -> str:
    """Bytes in words: 6.1 GiB, 24 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            digits = 0 if unit == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    raise AssertionError
