"""Tensor parallelism: how a model is cut over ranks (Shoeybi et al. 2019, Megatron-LM).

Attention is cut by heads and the MLP by neurons, so that a layer has two sums over the ranks. Each
rank holds a model of smaller sizes, `part_of`, and of embedding and head the rows of its tokens.
Qwen2.5-1.5B on 2 ranks: 6 of 12 query heads, 1 of 2 KV heads, 4,480 of 8,960 neurons each. Shares
need not be alike, and a KV head is copied to each rank whose query heads read it.

A sum that is cut is rounded elsewhere, and a token that was drawn by a hair changes. So the sums of
a row layer have `num_parts` parts with fixed bounds, whatever the number of ranks: with
`--sum-parts 4` one rank adds up four products, two ranks two each, in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from headway.config.device_choice import are_at_once
from headway.config.options import HALVES, EngineOptions
from headway.config.reasons import Reasons
from headway.config.speculation_config import choose_method
from headway.core.errors import UsageError
from headway.core.machine import Machine
from headway.spec import ModelSpec
from headway.spec.context_shards import SPLIT_TOKENS
from headway.spec.kv_format import kv_format

MOST_RANKS = 64
SOCKET = "socket"
KEEPS_ORDER = "sse2"
"""A flag of the CPUs whose stores other cores see in order: shared memory needs no fences there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How many ranks compute a model together, how they meet, and in how many parts they sum.

    `size` ranks compute every layer together, `stages` have some layers each: of a stage's layers
    each of its `size` ranks has a share. `sum_parts` is a multiple of `size`; 0: a part for each.
    A context lies on `context` times as many ranks (`spec.context_shards`): `size` ranks hold
    a part of it, each the keys and values of its own heads, of its stage's layers.

        size 2, stages 2      ranks 2, 3: the first layers      ranks 0, 1: the last ones, the head
        size 2, context 2     ranks 2, 3: the odd splits        ranks 0, 1: the even ones
        context 2, stages 2   ranks 2, 3: the first layers, of the even splits and the odd ones
    """

    size: int = 1
    stages: int = 1
    context: int = 1
    halves: bool = False
    """Whether attention is on one rank and the MLPs of all layers on another."""
    transport: str = "shared"
    sum_parts: int = 0

    @property
    def stages_text(self) -> str:
        """As `--pipeline-parallel-size` names them."""
        return str(HALVES if self.halves else self.stages)

    @property
    def num_ranks(self) -> int:
        """The processes of an engine."""
        return self.num_together * self.stages

    @property
    def num_together(self) -> int:
        """The ranks of a stage: what one raises all raise."""
        return self.size * self.context * (1 + self.halves)

    def stage_of(self, rank: int) -> int:
        """Which stage a rank is of; rank 0 draws, so it is of the last."""
        return self.stages - 1 - rank // self.num_together

    def place_of(self, rank: int) -> int:
        """Which of the ranks of its stage a rank is: neighbours are of one stage."""
        return rank % self.num_together

    @property
    def num_parts(self) -> int:
        """Parts of the inputs of each row layer, over all ranks."""
        return self.sum_parts or self.size

    @property
    def is_cut(self) -> bool:
        """Whether a row layer is more than one product."""
        return self.num_parts > 1


def bounds(inputs: int, parts: int, unit: int = 1) -> list[int]:
    """Where `parts` parts of the inputs begin and end, in whole groups of `unit` inputs.

    >>> bounds(896, 4, 64)
    [0, 192, 448, 640, 896]
    """
    return [part * inputs // (parts * unit) * unit for part in range(parts)] + [inputs]


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank has of each layer, as positions among all: where the parts of its sums begin and
    end behind the heads and behind the neurons, and its KV heads from the first to the last."""

    q: tuple[int, ...]
    kv_heads: tuple[int, int]
    neurons: tuple[int, ...]

    def part_of(self, spec: ModelSpec) -> ModelSpec:
        """The model that the rank holds."""
        first, end = self.kv_heads
        return replace(
            spec,
            num_heads=(self.q[-1] - self.q[0]) // spec.head_dim,
            num_kv_heads=end - first,
            intermediate_size=self.neurons[-1] - self.neurons[0],
        )


def cut_of(spec: ModelSpec, parallel: Parallel, rank: int, unit: int) -> Cut:
    """The share of a rank. Scales are for `unit` inputs, so parts are whole groups of them; heads
    are whole, unless there are more parts than heads.

    12 query heads of 128, 2 KV heads, 4 ranks: rank 1 has the query heads 3, 4, 5, which read KV
    head 0, as does rank 0. 14 and 2 on 4 ranks: 3, 4, 3 and 4 query heads.
    """
    whole = spec.head_dim if parallel.num_parts <= spec.num_heads else 1
    q = own_part(spec.q_size, parallel, rank, lcm(unit, whole))
    each = spec.num_heads // spec.num_kv_heads * spec.head_dim
    neurons = own_part(spec.intermediate_size, parallel, rank, unit)
    return Cut(q, (q[0] // each, -(-q[-1] // each)), neurons)


def own_part(inputs: int, parallel: Parallel, rank: int, unit: int) -> tuple[int, ...]:
    """The bounds of a rank's parts of so many inputs.

    >>> own_part(896, Parallel(size=2, sum_parts=4), 1, 64)
    (448, 640, 896)
    """
    each = parallel.num_parts // parallel.size
    boundaries = bounds(inputs, parallel.num_parts, unit)
    return tuple(boundaries[rank * each : (rank + 1) * each + 1])


def held_by_all(spec: ModelSpec, parallel: Parallel, unit: int) -> ModelSpec:
    """What all ranks hold together: a KV head once for each rank that reads it."""
    if parallel.size == 1:
        return spec
    ranges = [cut_of(spec, parallel, rank, unit).kv_heads for rank in range(parallel.size)]
    return replace(spec, num_kv_heads=sum(end - first for first, end in ranges))


def fault_of(spec: ModelSpec, parallel: Parallel, unit: int) -> str:
    """Why the numbers of a model cannot be cut so; "" where they can."""
    each, experts = spec.num_heads // spec.num_kv_heads, spec.experts
    if experts is not None and experts.count < parallel.size:
        return f"{experts.count} experts are fewer than {parallel.size} ranks"
    for rank in range(parallel.size):
        cut = cut_of(spec, parallel, rank, unit)
        counted = {"heads": cut.q}
        counted |= {"neurons": cut.neurons} if spec.num_sparse < spec.num_layers else {}
        for name, boundaries in counted.items():
            if any(begin >= end for begin, end in pairwise(boundaries)):
                inputs = spec.q_size if name == "heads" else spec.intermediate_size
                return (
                    f"the {inputs} inputs behind the {name} are no {parallel.num_parts} parts of "
                    f"whole groups of {unit}"
                )
        first, end = cut.q[0], cut.q[-1]
        if first % spec.head_dim or end % spec.head_dim:
            return f"{spec.num_heads} query heads are no whole ones on {parallel.size} ranks"
        heads = first // spec.head_dim, end // spec.head_dim
        if any(head % each for head in heads) and cut.kv_heads[1] - cut.kv_heads[0] > 1:
            return (
                f"query heads {heads[0]} to {heads[1] - 1} of {spec.num_heads} would be rank "
                f"{rank}'s, which are no whole groups of the {each} that read one KV head"
            )
    return ""


def check_cut(spec: ModelSpec, parallel: Parallel, unit: int) -> None:
    """Raise UsageError where the model cannot be cut so; its scales are for `unit` inputs each."""
    option = f"--tensor-parallel-size {parallel.size}"
    if parallel.sum_parts % parallel.size:
        raise UsageError(
            f"--sum-parts {parallel.sum_parts} is no multiple of {option}.",
            "Give a multiple, the same for every number of ranks that shall give the same tokens.",
        )
    if not parallel.is_cut:
        return
    kind = next(unlike(spec), "")
    if kind:
        raise UsageError(
            f"{option}, --sum-parts {parallel.sum_parts}: {spec.architecture} with {kind} is not "
            "cut yet.",
            "Serve it on one rank, or several engines of it with --replicas.",
        )
    fault = fault_of(spec, parallel, unit)
    if not fault:
        return
    sizes = [n for n in range(2, MOST_RANKS) if not fault_of(spec, Parallel(size=n), unit)]
    fits = f"{' or '.join(map(str, sizes))} ranks" if sizes else "No number of ranks"
    finer = ", lower --sum-parts or --quantization-group, or use --quantization int8"
    raise UsageError(
        f"{option}: {fault}.",
        f"{fits} can have it{finer if unit > 1 or parallel.sum_parts else ''}; or serve several "
        "engines with --replicas.",
    )


def unlike(spec: ModelSpec) -> Iterator[str]:
    """What of a model is not cut."""
    if spec.experts is not None and spec.experts.shared:
        yield "experts that every token visits"
    if spec.latent is not None:
        yield "latent attention"
    if spec.altup is not None or any(layer.kv_from is not None for layer in spec.layers):
        yield "layers that read the keys and values of others"
    if spec.states is not None or spec.output_gate:
        yield "layers that keep a state"
    if spec.qk_norm == "row":
        yield "norms over all heads"
    if any(format.permuted and name.endswith((".out", ".down")) for name, format in spec.formats):
        yield "weights whose inputs stand in another order (desc_act)"


def choose_parallel(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    device: str,
    unit: int,
    threads: int,
    reasons: Reasons,
) -> tuple[Parallel, int]:
    """(how the model is cut over ranks, the threads of each); UsageError where it cannot be.

    `unit` is how many inputs a scale of its weights is for.
    """
    size, stages = options.tensor_parallel_size, int(options.pipeline_parallel_size)
    context, halves = options.decode_context_parallel_size, stages == HALVES
    stages = 1 if halves else stages
    parallel = Parallel(
        size=size, stages=stages, context=context, halves=halves, sum_parts=options.sum_parts
    )
    check_cut(model, parallel, unit)
    if parallel.num_ranks == 1:
        return parallel, threads
    transport, why = choose_transport(parallel, machine)
    parallel = replace(parallel, transport=transport)
    refuse_with_parallel(options, device, parallel)
    check_family(model, parallel)
    at_once = are_at_once(options, threads)
    each = threads if halves else max(threads // parallel.num_together, 1)
    each = max(each // stages, 1) if at_once else each
    how = f"given; threads of each: {each}; "
    if context > 1:
        how += f"sums of attention over {transport}: {why}"
        reasons.choose("decode_context_parallel_size", (context, how))
    if stages > 1 or halves:
        turns = f"given; they work in turns, so each has all {threads} threads"
        turns = f"{how}each has a step, of other requests" if at_once else turns
        turns += f"; {transport}: {why}" if size * context == 1 else ""
        reasons.choose("pipeline_parallel_size", (str(options.pipeline_parallel_size), turns))
    if size > 1:
        reasons.choose("tensor_parallel_size", (size, f"{how}sums over {transport}: {why}"))
    return parallel, each


def check_family(model: ModelSpec, parallel: Parallel) -> None:
    """Raise UsageError where the layers of a model do not come apart so."""
    if parallel.halves:
        check_halves(model)
    if parallel.context > 1:
        check_context(model, parallel)
    if parallel.stages > 1:
        check_stages(model, parallel.stages)


def choose_transport(parallel: Parallel, machine: Machine) -> tuple[str, str]:
    """(how ranks meet, why): stages by sockets, ranks of one stage in shared memory, or by gloo.

    Where stages have several ranks each these meet as said, and sockets join the stages, or gloo.
    """
    if parallel.num_together == 1 or parallel.halves:
        return SOCKET, "who waits leaves its core to the others"
    if KEEPS_ORDER in machine.cpu_flags:
        return "shared", "memory that they share"
    return "gloo", "this CPU may reorder stores"


def refuse_with_parallel(options: EngineOptions, device: str, parallel: Parallel) -> None:
    """UsageError for what is not there with several ranks."""
    sizes = {
        "--decode-context-parallel-size": parallel.context,
        "--tensor-parallel-size": parallel.size,
        "--pipeline-parallel-size": HALVES if parallel.halves else parallel.stages,
    }
    name = next(name for name, size in sizes.items() if size != 1)
    refused = {
        "--pipeline-parallel-size halves": parallel.num_together > 2 and parallel.halves,
        "--device cuda": device == "cuda",
        "--speculative-method": choose_method(options) != "off",
        "--kv-read": bool(options.kv_read),
        "--kv-keep": bool(options.kv_keep),
        "--kv-disk": bool(options.kv_disk),
        "--kv-host-memory": bool(options.kv_host_memory),
    }
    for other, is_given in refused.items():
        if is_given:
            raise UsageError(
                f"{name} {sizes[name]}: {other} is not there with "
                f"{'it' if other.split()[0] in sizes else 'several ranks'} yet.",
                "Leave one of them out, or serve several engines with --replicas.",
            )


def check_context(model: ModelSpec, parallel: Parallel) -> None:
    """Raise UsageError where a model's contexts cannot be dealt over ranks."""
    what = ""
    if any(layer.window for layer in model.layers):
        what = "has layers with a window, which see no more than one rank holds"
    elif model.latent is not None:
        what = "has latent attention"
    elif model.states is not None:
        what = "keeps a state of each sequence"
    elif model.altup is not None or any(layer.kv_from is not None for layer in model.layers):
        what = "has layers that read the keys and values of others"
    if what:
        raise UsageError(
            f"--decode-context-parallel-size {parallel.context}: {model.architecture} {what}, "
            "which is not dealt over ranks.",
            "Serve it on one rank, with --tensor-parallel-size, or several engines of it with "
            "--replicas.",
        )


def check_halves(model: ModelSpec) -> None:
    """Raise UsageError where the layers of a model have no two halves."""
    shares = model.altup is not None or any(layer.kv_from is not None for layer in model.layers)
    what = "has more between its layers than hidden states" if shares else ""
    what = "keeps a state of each sequence" if model.states else what
    if what:
        raise UsageError(
            f"--pipeline-parallel-size halves: {model.architecture} {what}, which is not there "
            "with it.",
            "Serve it on one rank, or several engines of it with --replicas.",
        )


def check_context_shards(parallel: Parallel, backend: str, kv_dtype: str, block_size: int) -> None:
    """Raise UsageError where contexts are dealt over ranks, and keys and values cannot be."""
    native = "Native attention alone has it: leave --attention-backend out."
    refused = (
        (backend != "native", f"--attention-backend {backend}", native),
        (bool(kv_format(kv_dtype).block_size), f"--kv-cache-dtype {kv_dtype}", "Give int8."),
        (SPLIT_TOKENS % block_size != 0, f"--block-size {block_size}", "Give 16 or 32."),
    )
    for is_so, option, fix in refused if parallel.context > 1 else ():
        if is_so:
            name = f"--decode-context-parallel-size {parallel.context}"
            raise UsageError(f"{name}: {option} is not there with it.", fix)


def check_stages(model: ModelSpec, stages: int) -> None:
    """Raise UsageError where the layers of a model are no pipeline."""
    option = f"--pipeline-parallel-size {stages}"
    if stages > model.num_layers:
        raise UsageError(
            f"{option}: the model has {model.num_layers} layers.",
            f"Give {model.num_layers} at most.",
        )
    shares = model.altup is not None or any(layer.kv_from is not None for layer in model.layers)
    what = "has more between its layers than hidden states" if shares else ""
    what = "keeps a state of each sequence, which no stage has yet" if model.states else what
    if what:
        raise UsageError(
            f"{option}: {model.architecture} {what}.",
            "Serve it on one rank, or several engines of it with --replicas.",
        )
