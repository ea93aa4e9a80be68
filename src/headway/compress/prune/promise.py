"""Predicted effect of pruning on this machine.

The bytes of a step bound the speed of decoding, FLOPs that of a prefill. A removed neuron, head or
layer reduces both. A zero reduces neither, because no kernel skips it (docs/prune.md describes the
prototype): a compressed file becomes smaller and nothing faster.
"""

from dataclasses import replace

from headway.compress.estimate import BASE_BYTES
from headway.compress.prune.prune import PruneSettings
from headway.spec import ModelSpec

SizeRow = tuple[str, str, str, str]
"""(quantity, before, after, effect)."""
CONTEXT_TOKENS = 512


def smaller_spec(spec: ModelSpec, settings: PruneSettings) -> ModelSpec:
    """Return the dimensions after pruning, without the choice of layers."""
    kv_heads = spec.num_kv_heads - settings.kv_heads
    group = spec.num_heads // spec.num_kv_heads - settings.heads
    return replace(
        spec,
        layers=spec.layers[: spec.num_layers - settings.layers],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=settings.remaining_neurons(spec)
        if settings.neurons
        else spec.intermediate_size,
    )


def size_rows(before: ModelSpec, after: ModelSpec, settings: PruneSettings) -> list[SizeRow]:
    """Return the table for the terminal and the card."""
    rows: list[SizeRow] = []

    def row(what: str, old: float, new: float, brings: str = "") -> None:
        if old != new:
            rows.append((what, f"{old:,}", f"{new:,}", brings))

    row("layers", before.num_layers, after.num_layers)
    row("query heads", before.num_heads, after.num_heads)
    row("KV heads", before.num_kv_heads, after.num_kv_heads)
    row("neurons of an MLP", before.intermediate_size, after.intermediate_size)
    row("parameters", before.num_parameters, after.num_parameters)
    if settings.is_smaller:
        read, less = (bytes_of_step(spec) for spec in (before, after))
        row("bytes of a decode step", read, less, f"decodes at most {read / less:.2f}x as fast")
        work, rest = (
            spec.flops(CONTEXT_TOKENS, CONTEXT_TOKENS // 2, 1) for spec in (before, after)
        )
        row("FLOPs of a prefill", work, rest, f"prefills at most {work / rest:.2f}x as fast")
        row("KV bytes a token", before.kv_bytes_per_token(), after.kv_bytes_per_token())
    if settings.pattern is not None:
        rows.append(zeros(after, settings.pattern.share))
    return rows


def memory(before: ModelSpec, after: ModelSpec, settings: PruneSettings) -> int:
    """Estimate peak memory: weights in fp32, of a smaller model twice; H of one matrix, its
    inverse, and a few copies.
    """
    widest = max(before.intermediate_size, before.q_size, before.hidden_size)
    weights = before.num_parameters + (after.num_parameters if settings.is_smaller else 0)
    return BASE_BYTES + 4 * (weights + 6 * widest**2)


def bytes_of_step(spec: ModelSpec) -> int:
    """Return the bytes that a decode step reads: weights, and KV of CONTEXT_TOKENS tokens."""
    return spec.step_weight_bytes() + CONTEXT_TOKENS * spec.kv_bytes_per_token()


def zeros(spec: ModelSpec, share: float) -> SizeRow:
    """Return the row for zeros: compressed, a zero takes a bit of a mask, another weight 16
    bits."""
    layers = spec.num_parameters - spec.embedding_parameters * (1 if spec.tied else 2)
    size = spec.weight_bytes()
    packed = size - int(layers * size / spec.num_parameters * share) + layers // 8
    what = "no faster here, smaller on disk only where the disk or an archive compresses"
    return "bytes, compressed", f"{size:,}", f"about {packed:,}", what
