"""What the memory of a machine holds: weights, and KV blocks for the rest.

Given options, machine and model, sizes in bytes and counts of blocks, each with its reason; raises
CapacityError where something does not fit. Worked example, Qwen2.5-0.5B in bf16 with 10 GiB free:
weights 0.92 GiB, 40% of the rest is 3.63 GiB for KV, a block of 16 tokens of 12 KiB is 192 KiB, so
19,834 blocks.
"""

from dataclasses import replace
from math import ceil

from headway.config.kv_keep import keep_share
from headway.config.kv_states import checkpoint_blocks, plan_states
from headway.config.options import Bytes, EngineOptions
from headway.config.reasons import Reasons
from headway.core.errors import CapacityError, UsageError
from headway.core.machine import Machine
from headway.spec import DTYPE_BYTES, KVGroupSpec, ModelSpec
from headway.spec.context_shards import ContextShards
from headway.spec.kv_format import LEAST_OPEN, kv_format
from headway.spec.quantization import Quantization, planned_bytes

GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that we use unless `--gpu-memory-utilization` says another; as vLLM."""
DEFAULT_KV_SHARE = 0.4
"""Share of the free RAM for KV: chosen, for other programs need RAM too and may grow."""
PACKED_SHARE = 0.5
"""Packed fp32 weights may take this share of the free RAM; KV and activations need the rest."""
ANSWER = 1 / 8
"""Of a context so much is taken to be answer, which is kept whole behind a part of a prompt."""
OPEN_CONTEXT = 1024
"""Where KV is short, an open block is kept for each so many tokens that the rounded ones hold."""
OPEN_SPARE = 2
"""And so many more for the chunks of a step, which are cut to the open blocks that are free."""
CUDA_ACTIVATION_BYTES = 2 * 2**30
"""Kept free on a GPU for activations and logits where they cannot be counted: an estimate."""
SCALED = {
    "longrope": "LongRoPE's short factors for requests of up to {} tokens with their answer, the "
    "long ones for others and for those without max_tokens",
    "dynamic": "a prompt beyond {} tokens has its rope scaled for its own length",
}
"""What lengths decide, by the kind of the rope."""
CUDA_LIBRARY_BYTES = 256 * 2**20
"""Kept free beside what is counted, for workspaces of libraries and for gaps: an estimate."""


def plan_weights(
    machine: Machine,
    model: ModelSpec,
    device: str,
    dtype: str,
    kernels: str,
    quantization: Quantization,
    reasons: Reasons,
) -> tuple[bool, int]:
    """(whether torch packs the linear layers in fp32, bytes of all weights then)."""
    if not quantization.rounded:
        pack, num_bytes, pack_why = plan_plain(machine, model, device, dtype, kernels)
        why = f"{model.num_parameters:,} parameters of {dtype}"
    else:
        pack, pack_why = False, "they are rounded"
        num_bytes, why = plan_rounded(machine, model, dtype, quantization)
    reasons.choose("pack_weights", ("yes" if pack else "no", pack_why))
    return pack, reasons.choose("weights", (num_bytes, why), shown=gib)


def plan_plain(
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
    unpacked = model.embedding_parameters * DTYPE_BYTES[dtype] if dtype == "float32" else plain
    packed = linear * DTYPE_BYTES["float32"] + unpacked
    if packed > machine.free_bytes * PACKED_SHARE:
        return False, plain, f"in fp32 they would take {gib(packed)} of {gib(machine.free_bytes)}"
    return True, packed, f"fp32 GEMMs are the fastest here; {gib(plain)} if not"


def plan_rounded(
    machine: Machine, model: ModelSpec, dtype: str, quantization: Quantization
) -> tuple[int, str]:
    """(bytes of the weights once they are rounded, why); CapacityError where loading takes more.

    They are read and rounded one matrix at a time: the largest is there in both forms.
    """
    num_bytes = planned_bytes(quantization, model, dtype)
    experts = model.experts
    inner = experts.count * experts.intermediate_size if experts else 0
    head = 0 if model.tied else model.vocab_size
    outputs = max(head, 2 * model.intermediate_size, 2 * inner)
    way = outputs * model.hidden_size * (DTYPE_BYTES[dtype] + 1)
    if num_bytes + way > machine.free_bytes:
        raise CapacityError(
            f"The weights need {gib(num_bytes)}, and {gib(way)} to round the largest matrix; "
            f"{gib(machine.free_bytes)} are free.",
            "Serve a smaller model, or free memory.",
        )
    why = f"{model.num_parameters:,} parameters, {quantization}; {gib(way)} more on the way"
    return num_bytes, why


def plan_blocks(
    options: EngineOptions,
    model: ModelSpec,
    groups: tuple[KVGroupSpec, ...],
    kv_dtype: str,
    budget: int,
    max_num_seqs: int,
    max_chunk: int,
    reasons: Reasons,
) -> tuple[tuple[int, ...], int]:
    """(KV blocks by group, longest context) that `budget` bytes hold."""
    if options.max_model_len and options.max_model_len > model.max_len:
        raise UsageError(
            f"max_model_len ({options.max_model_len}) is beyond what the model was made for.",
            f"config.json says max_position_embeddings = {model.max_len}.",
        )
    assert options.block_size is not None, "it is chosen by now"
    size, wanted_len = options.block_size, options.max_model_len or model.default_len
    states: tuple[int, ...] = ()
    if groups[-1].states is not None:
        every = checkpoint_blocks(model, kv_dtype, size) * size
        tokens = model.kv_bytes_per_token(kv_dtype)
        states = (
            plan_states(
                options, groups[-1], tokens, every, budget, max_num_seqs, wanted_len, reasons
            ),
        )
        budget -= (states[0] + 1) * groups[-1].slot_bytes
        groups = groups[:-1]
    block_bytes = [group.bytes_per_token(kv_dtype) * size for group in groups]
    useful = [useful_blocks(group, size, wanted_len, max_num_seqs, max_chunk) for group in groups]
    if kv_format(kv_dtype).block_size:
        each = sum(block_bytes[:-1]) * OPEN_CONTEXT // size + block_bytes[-1]
        useful[-1] = min(useful[-1], budget // each + OPEN_SPARE)
    longest = -(-wanted_len // size)
    counts = share_among(options, groups, budget, useful, block_bytes, longest)
    alone = [most_blocks(group, size, wanted_len, max_chunk) for group in groups]
    capacity = min(
        wanted_len if group.window and count >= most else longest_context(group, count, size)
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
    explain_blocks(groups, counts, size, kv_dtype, limit, reasons)
    length = choose_length(options, model, min(wanted_len, capacity))
    blocks = tuple(count + 1 for count in (*counts, *states))
    return blocks, reasons.choose("max_model_len", length)


def with_open_blocks(
    groups: tuple[KVGroupSpec, ...], model: ModelSpec, dtype: str, kv_dtype: str
) -> tuple[KVGroupSpec, ...]:
    """The KV groups, and one more where the format rounds a block when it is full.

    It holds the open block of each sequence, and the blocks of a chunk, as computed.
    So is what a drafter keeps, in blocks of the model's numbers.
    """
    if not kv_format(kv_dtype).block_size:
        return groups
    groups = tuple(
        replace(group, riders=tuple(replace(rider, kv_dtype=dtype) for rider in group.riders))
        for group in groups
    )
    return (
        *groups,
        KVGroupSpec(
            layers=tuple(
                i
                for i, layer in enumerate(model.layers)
                if layer.kv_from is None and not layer.kv_dtype and not layer.state
            ),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            window=1,
            kv_dtype=dtype,
            is_open=True,
        ),
    )


def explain_blocks(
    groups: tuple[KVGroupSpec, ...],
    counts: list[int],
    block_size: int,
    kv_dtype: str,
    limit: str,
    reasons: Reasons,
) -> None:
    """A reason for the blocks of each group; `limit` says what bounds them."""
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        sees = f"a window of {group.window} tokens" if group.window else "full attention"
        sees += f" and the first {group.sinks}" if group.sinks else ""
        sees += " that keep a part of a prompt" if group.chooses else ""
        sees += f", on rank {group.rank}" if group.ranks > 1 else ""
        where = f" in {len(group.layers)} layers of {sees}" if len(groups) > 1 else ""
        if group.is_open:
            where = f" in {group.kv_dtype}: the newest of each sequence, not rounded yet"
        elif group.kv_dtype:
            where += f", in {group.kv_dtype}"
        token_kib = group.bytes_per_token(kv_dtype) / 1024
        name = f"kv_blocks_{index}" if len(groups) > 1 else "kv_blocks"
        why = (
            f"{limit}, blocks of {block_size} tokens of {token_kib:g} KiB{where}; "
            f"holds {count * block_size:,} tokens"
        )
        reasons.choose(name, (count, why))


def choose_length(options: EngineOptions, model: ModelSpec, capacity: int) -> tuple[int, str]:
    """The longest context, `capacity`, and what bounds it."""
    rope, scaled = model.length_rope, ""
    if rope is not None and capacity > rope.original_max_len:
        scaled = f"; {SCALED[rope.kind].format(rope.original_max_len)}"
    if options.max_model_len:
        return capacity, f"given{scaled}"
    if capacity < model.default_len:
        return capacity, f"what the KV blocks hold; the model allows {model.max_len}{scaled}"
    if capacity < model.max_len:
        return capacity, (
            "the length that LongRoPE's short factors are for; "
            f"--max-model-len serves up to {model.max_len}"
        )
    return capacity, f"the model's max_position_embeddings{scaled}"


def most_blocks(group: KVGroupSpec, block_size: int, length: int, max_chunk: int) -> int:
    """The most blocks one sequence of `length` tokens holds at once in this group.

    Blocks of 16: a context of 8,192 takes 512; with a window of 512 and chunks of 512 it takes 65.
    Of open blocks two are enough: a longer chunk is cut to those that are free.
    """
    whole = -(-length // block_size)
    if group.states is not None:
        return 1
    if group.is_open:
        return min(whole, LEAST_OPEN)
    if group.ranks > 1:
        return max(ContextShards(group.ranks, block_size).counts(0, whole)[group.rank], 1)
    if not group.window:
        return whole
    sink_blocks = -(-group.sinks // block_size)
    return min(whole, -(-(group.window - 1 + max_chunk) // block_size) + 1 + sink_blocks)


def useful_blocks(
    group: KVGroupSpec, block_size: int, length: int, max_num_seqs: int, max_chunk: int
) -> int:
    """Blocks that `max_num_seqs` sequences of `length` can fill; one step's chunks are shared."""
    if group.states is not None:
        return max_num_seqs
    each = 1 if group.window == 1 else most_blocks(group, block_size, length, 1)
    chunks = -(-max_chunk // block_size) if group.window else 0
    return min(max_num_seqs * each + chunks, max_num_seqs * -(-length // block_size))


def longest_context(group: KVGroupSpec, count: int, block_size: int) -> int:
    """Tokens of the longest context that `count` blocks of a group hold."""
    if group.ranks > 1:
        return ContextShards(group.ranks, block_size).longest(group.rank, count) * block_size
    return count // (1 + group.chooses) * block_size


def share_blocks(budget: int, useful: list[int], block_bytes: list[int]) -> list[int]:
    """As many blocks for each group, but none more than is useful; block 0 of each is paid first.

    1,000 bytes, blocks of 10 and 30 bytes: 24 of each; when 8 of the second are useful, the first
    gets 72. So a window group never fills before a full one does, and what it saves is theirs.
    """
    counts = [0] * len(useful)
    free_bytes, sizes = budget - sum(block_bytes), sum(block_bytes)
    for group in sorted(range(len(useful)), key=lambda group: useful[group]):
        counts[group] = max(0, min(useful[group], free_bytes // sizes))
        free_bytes -= counts[group] * block_bytes[group]
        sizes -= block_bytes[group]
    return counts


def share_among(
    options: EngineOptions,
    groups: tuple[KVGroupSpec, ...],
    budget: int,
    useful: list[int],
    block_bytes: list[int],
    length: int,
) -> list[int]:
    """`share_blocks`, of layers that choose as many as they keep, and those that one request takes
    while its prompt is whole: twice the prompt's.

    10,000 bytes, blocks of 10 bytes in a group that keeps a quarter of a prompt, 11/32 of all,
    and in one that keeps all, 100 blocks a context: 200 for one, and of the rest 195 and 570.
    """
    if not any(group.chooses for group in groups):
        return share_blocks(budget, useful, block_bytes)
    held = ANSWER + (1 - ANSWER) * keep_share(options.kv_keep)
    shares = [held if group.chooses else 1.0 for group in groups]
    one = min(2 * length, budget // sum(block_bytes) // 2)
    whole = [one * group.chooses for group in groups]
    scaled = [ceil(s * size) for s, size in zip(shares, block_bytes, strict=True)]
    free_bytes = budget - sum(n * size for n, size in zip(whole, block_bytes, strict=True))
    counts = share_blocks(free_bytes - sum(block_bytes) + sum(scaled), useful, scaled)
    return [int(s * n) + more for s, n, more in zip(shares, counts, whole, strict=True)]


def plan_host_blocks(
    options: EngineOptions,
    machine: Machine,
    groups: tuple[KVGroupSpec, ...],
    kv_dtype: str,
    num_blocks: tuple[int, ...],
    reserved_bytes: int,
    reasons: Reasons,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(blocks in host memory, bytes of a block) by group; () and () without --kv-host-memory.

    The groups get as many as they have of `num_blocks`, in proportion. `reserved_bytes` of the
    host's free memory have a use already.
    """
    given = options.kv_host_memory
    if not given:
        reasons.choose("host_blocks", (0, "what is preempted is computed again"))
        return (), ()
    free = machine.free_bytes - reserved_bytes
    share = Bytes(given).share
    budget = int(given if share is None else free * share)
    if budget > free:
        raise CapacityError(
            f"--kv-host-memory {gib(budget)} is more than the {gib(max(free, 0))} of RAM left.",
            "Lower --kv-host-memory.",
        )
    assert options.block_size is not None, "it is chosen by now"
    sizes = bytes_of_blocks(groups, kv_dtype, options.block_size)
    here = [count - 1 for count in num_blocks]
    whole = sum(count * size for count, size in zip(here, sizes, strict=True))
    blocks = tuple(count * budget // whole for count in here)
    if not all(blocks):
        raise CapacityError(
            f"--kv-host-memory {gib(budget)} does not hold a block of each KV group.",
            "Raise --kv-host-memory, or leave it out.",
        )
    why = f"{gib(budget)} for preempted requests, where a copy is cheaper than to compute again"
    reasons.choose("host_blocks", (blocks, why), shown=lambda b: ", ".join(map(str, b)))
    return blocks, sizes


def bytes_of_blocks(
    groups: tuple[KVGroupSpec, ...], kv_dtype: str, block_size: int
) -> tuple[int, ...]:
    """Bytes of a block by KV group."""
    return tuple(group.block_bytes(kv_dtype, block_size) for group in groups)


def plan_activations(device: str, counted: int | None) -> tuple[int, str]:
    """(bytes of a step beside weights and KV, why); on a CPU they are in what is left free."""
    if device == "cpu":
        return 0, "in what is left free of the RAM"
    if counted is None:
        return CUDA_ACTIVATION_BYTES, "an estimate: this model's layers cannot be counted"
    why = f"{gib(counted)} counted of the largest steps, {gib(CUDA_LIBRARY_BYTES)} for libraries"
    return counted + CUDA_LIBRARY_BYTES, why


def kv_budget(
    options: EngineOptions, machine: Machine, weights: int, device: str, activations: int = 0
) -> tuple[int, str]:
    """(bytes for KV, why); raises CapacityError when the weights alone do not fit."""
    if device == "cuda":
        assert machine.accelerator is not None
        utilization = options.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        usable = int(machine.accelerator.total_bytes * utilization)
        free = min(usable, machine.accelerator.free_bytes) - weights - activations
        place = f"{utilization:.0%} of the GPU less weights and activations"
    elif options.gpu_memory_utilization is not None:
        usable = int(machine.total_bytes * options.gpu_memory_utilization)
        free = min(usable, machine.free_bytes) - weights
        place = (
            f"{options.gpu_memory_utilization:.0%} of the RAM, as far as it is free, less weights"
        )
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
        if device == "cuda" or options.gpu_memory_utilization is not None:
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
