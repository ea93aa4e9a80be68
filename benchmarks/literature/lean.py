"""How small a context's keys and values become, one means after the other, in bytes held.

Multi-query, windows in all layers but one, layers that share, fewer bits: what Character.AI (2024)
name for a KV cache 20 times smaller. The model's shape with as many KV heads as query heads, all
layers global, in 16 bits, counts as 1. By the arithmetic of the memory plan, whole blocks; nothing
is computed.
"""

from dataclasses import dataclass, replace
from typing import Any

from headway.config.cache_config import DEFAULT_BLOCK_SIZE
from headway.config.memory_plan import most_blocks
from headway.spec import LayerSpec, ModelSpec
from headway.spec.kv_format import kv_format

GLOBAL = 1
"""The layer that sees everything: headway-tiny looks up there."""
BY_LAYER = (128, 0, 128, 64, 96, 192)
"""Windows, each with 4 sinks, with which headway-tiny passes the gate."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """One row: KV heads, the window of all layers but one (0: none), whether layers share, bits.

    `trained` says that the weights would have to be trained so; the others serve as they are.
    """

    name: str
    kv_heads: int
    windows: tuple[int, ...] = ()
    sinks: int = 0
    shared: bool = False
    dtype: str = "bfloat16"
    trained: bool = True


def lean(spec: ModelSpec, means: Means) -> ModelSpec:
    """`spec` with these means; of neighbours that share the second reads the first."""
    layers = [replace(layer, window=0, sinks=0, kv_from=None) for layer in spec.layers]
    for at, window in enumerate(means.windows):
        layers[at] = replace(layers[at], window=window, sinks=means.sinks if window else 0)
    if means.shared:
        for at in range(1, len(layers)):
            if may_share(layers[at - 1], layers[at]):
                layers[at] = replace(layers[at], kv_from=at - 1)
    return replace(spec, num_kv_heads=means.kv_heads, layers=tuple(layers))


def may_share(first: LayerSpec, second: LayerSpec) -> bool:
    """Whether the second can read what the first keeps, which is its own."""
    return first.kv_from is None and first.window == second.window


def held(spec: ModelSpec, dtype: str, context: int) -> int:
    """Bytes that one context holds while it decodes, in whole blocks."""
    size = kv_format(dtype).block_size or DEFAULT_BLOCK_SIZE
    return sum(
        most_blocks(group, size, context, 1) * group.bytes_per_token(dtype) * size
        for group in spec.kv_groups
    )


def rows(spec: ModelSpec) -> list[Means]:
    """What is counted, one means more each."""

    def all_but_one(window: int) -> tuple[int, ...]:
        return tuple(0 if at == GLOBAL else window for at in range(spec.num_layers))

    heads, own, many, mqa = spec.num_heads, spec.num_kv_heads, "multi-head", "multi-query"
    found = [
        Means(name=f"{many}, all layers global, 16 bits", kv_heads=heads),
        Means(name=mqa, kv_heads=1, trained=own != 1),
        Means(name=f"{mqa}, int8", kv_heads=1, dtype="int8", trained=own != 1),
    ]
    if own == 1 and spec.num_layers == len(BY_LAYER):
        by_layer: dict[str, Any] = {"windows": BY_LAYER, "sinks": 4, "trained": False}
        name = f"{mqa}, windows by layer"
        found += [
            Means(name=name, kv_heads=1, **by_layer),
            Means(name=f"{name}, int8", kv_heads=1, dtype="int8", **by_layer),
        ]
    for window in (256, 64):
        told: dict[str, Any] = {"kv_heads": 1, "windows": all_but_one(window)}
        name = f"{mqa}, windows of {window} in all layers but one"
        found.append(Means(name=name, **told))
        for dtype in ("bfloat16", "int8"):
            bits = ", int8" if dtype == "int8" else ""
            shared = f"{name}, shared by neighbours{bits}"
            found.append(Means(name=shared, shared=True, dtype=dtype, **told))
    return found


def table(spec: ModelSpec, context: int) -> list[tuple[Means, int, float]]:
    """(means, bytes held, times fewer than the first row's) of each row."""
    counted = [(means, held(lean(spec, means), means.dtype, context)) for means in rows(spec)]
    whole = counted[0][1]
    return [(means, count, whole / count) for means, count in counted]
