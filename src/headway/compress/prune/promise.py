"""What pruning brings on this machine, said before it is done.

Bytes that a step reads bound the speed of a decode step, FLOPs that of a prefill. A removed neuron,
head or layer is less of both. A zero is less of neither: no kernel here skips it (docs/prune.md has
the prototype that tried), so it makes a compressed file smaller and nothing faster.
"""

from dataclasses import replace

from headway.compress.estimate import BASE_BYTES
from headway.compress.prune.prune import Wanted
from headway.spec import ModelSpec

Row = tuple[str, str, str, str]
"""What, before, after, what that brings."""
CONTEXT = 512


def smaller_spec(spec: ModelSpec, wanted: Wanted) -> ModelSpec:
    """The dimensions that will be left; which of the layers go is not known yet."""
    kv_heads = spec.num_kv_heads - wanted.kv_heads
    group = spec.num_heads // spec.num_kv_heads - wanted.heads
    return replace(
        spec,
        layers=spec.layers[: spec.num_layers - wanted.layers],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=wanted.neurons_left(spec) if wanted.neurons else spec.intermediate_size,
    )


def promised(before: ModelSpec, after: ModelSpec, wanted: Wanted) -> list[Row]:
    """The table that is printed first and stands in the card."""
    rows: list[Row] = []

    def row(what: str, old: float, new: float, brings: str = "") -> None:
        if old != new:
            rows.append((what, f"{old:,}", f"{new:,}", brings))

    row("layers", before.num_layers, after.num_layers)
    row("query heads", before.num_heads, after.num_heads)
    row("KV heads", before.num_kv_heads, after.num_kv_heads)
    row("neurons of an MLP", before.intermediate_size, after.intermediate_size)
    row("parameters", before.num_parameters, after.num_parameters)
    if wanted.is_smaller:
        read, less = (bytes_of_step(spec) for spec in (before, after))
        row("bytes of a decode step", read, less, f"decodes at most {read / less:.2f}x as fast")
        work, rest = (spec.flops(CONTEXT, CONTEXT // 2, 1) for spec in (before, after))
        row("FLOPs of a prefill", work, rest, f"prefills at most {work / rest:.2f}x as fast")
        row("KV bytes a token", before.kv_bytes_per_token(), after.kv_bytes_per_token())
    if wanted.pattern is not None:
        rows.append(zeros(after, wanted.pattern.share))
    return rows


def memory(before: ModelSpec, after: ModelSpec, wanted: Wanted) -> int:
    """About the bytes at the peak: the weights in fp32, of a smaller model twice; H of one matrix
    and its inverse, with a copy or two on the way."""
    widest = max(before.intermediate_size, before.q_size, before.hidden_size)
    weights = before.num_parameters + (after.num_parameters if wanted.is_smaller else 0)
    return BASE_BYTES + 4 * (weights + 6 * widest**2)


def bytes_of_step(spec: ModelSpec) -> int:
    """What a decode step of one sequence reads: weights, and KV of CONTEXT tokens."""
    return spec.step_weight_bytes() + CONTEXT * spec.kv_bytes_per_token()


def zeros(spec: ModelSpec, share: float) -> Row:
    """A zero costs a bit in a mask, and the others their 16."""
    layers = spec.num_parameters - spec.embedding_parameters * (1 if spec.tied else 2)
    size = spec.weight_bytes()
    packed = size - int(layers * size / spec.num_parameters * share) + layers // 8
    what = "no faster here, smaller on disk only where the disk or an archive compresses"
    return "bytes, compressed", f"{size:,}", f"about {packed:,}", what
