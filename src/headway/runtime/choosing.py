"""Which tokens of a computed prompt a layer keeps: those whose keys are least like the others'.

Keys of tokens that say little lie close to each other, and to their mean; those that stand apart
are what queries look for (Park et al. 2025, *KeyDiff*). It needs neither queries nor scores, only
what is in memory. For each KV head, of the keys k of C tokens:

    unit_c = k_c / |k_c|      mean = Σ unit_c / C      alike_c = unit_c · mean / |mean|

The first tokens and the newest are kept, and of the others those least alike; of equals the first.
Keys stay turned by their own positions. C tokens, K of them kept, G KV heads, D numbers of a key.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headway.core.kv_keep import FIRST, NEWEST
from headway.core.plan import Shrink, StepPlan
from headway.runtime.attention import KVLayer
from headway.runtime.attention.cache import copy_blocks


class Kept(NamedTuple):
    """What lay in slots of a layer, as it lay there, and the slots where it will lie."""

    layer: KVLayer
    parts: list[Tensor]
    slots_K: Tensor


def move(layers: list[KVLayer], plan: StepPlan) -> None:
    """A plan's copies, and its shrinks: read before a copy is written where they lay."""
    kept = choose(layers, plan.shrinks)
    if plan.copies:
        copy_blocks(layers, plan.copies)
    put(kept)


def choose(layers: Sequence[KVLayer], shrinks: Sequence[Shrink]) -> list[Kept]:
    """What of each layer is kept; nothing is written yet."""
    found = []
    for shrink in shrinks:
        for layer in layers:
            if layer.group == shrink.group:
                found.append(of_layer(layer, shrink))
    return found


def of_layer(layer: KVLayer, shrink: Shrink) -> Kept:
    """The tokens that one layer keeps of one sequence."""
    size, device = layer.block_size, layer.k.device
    sources, targets = (
        torch.tensor(blocks, device=device) for blocks in (shrink.sources, shrink.blocks)
    )
    count = shrink.num_tokens - (len(sources) - len(targets)) * size
    k_CGD, _ = layer.gather(sources)
    places_GK = least_alike(k_CGD[: shrink.num_tokens], count)
    to_K = torch.arange(count, device=device)
    return Kept(
        layer,
        layer.read(sources[places_GK // size] * size + places_GK % size),
        targets[to_K // size] * size + to_K % size,
    )


def put(kept: Sequence[Kept]) -> None:
    """Write what was chosen where it will lie."""
    for layer, parts, slots_K in kept:
        layer.put(parts, slots_K)


def least_alike(k_CGD: Tensor, count: int) -> Tensor:
    """By KV head the places of the `count` tokens that are kept, (G, count), as they lie."""
    unit_CGD = functional.normalize(k_CGD.float(), dim=-1)
    mean_GD = functional.normalize(unit_CGD.mean(0), dim=-1)
    alike_CG = (unit_CGD * mean_GD).sum(-1)
    alike_CG = alike_CG.where(~alike_CG.isnan(), float("inf"))
    alike_CG[:FIRST] = alike_CG[len(alike_CG) - min(NEWEST, count) :] = float("-inf")
    return alike_CG.sort(dim=0, stable=True).indices[:count].sort(0).values.T
