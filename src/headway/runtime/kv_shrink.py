"""Shrink the KV of a computed prompt: each KV head keeps the tokens that it ranks highest.

The first and the newest tokens stay, and of the others those that KeyDiff ranks highest; among
equal ranks the first. Keys stay rotated by their own positions. C tokens, K of them stay, G KV
heads, D size of a key.

*KeyDiff* (Park et al. 2025) ranks by the keys alone. Keys of tokens with little information
lie close to each other and to their mean; queries look for the keys that stand apart. Of the keys k
of a KV head, those least similar to the mean rank highest:

    unit_c = k_c / |k_c|      mean = Σ unit_c / C      alike_c = unit_c · mean / |mean|
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headway.config.kv_keep import FIRST, NEWEST
from headway.core.plan import Shrink, StepPlan
from headway.runtime.attention import KVLayer
from headway.runtime.attention.cache import copy_blocks
from headway.runtime.batch import WorkerState


class SlotMove(NamedTuple):
    """Entries of a layer that were read from their slots, and the slots where they go."""

    layer: KVLayer
    parts: list[Tensor]
    slots_K: Tensor


def copy_and_shrink(layers: list[KVLayer], plan: StepPlan, state: WorkerState) -> None:
    """Apply the copies and shrinks of a plan; shrinks read before a copy overwrites their slots."""
    moves = list[SlotMove]()
    for shrink in plan.shrinks:
        if shrink.sequence_id in state.sequences:
            moves += select_tokens(layers, shrink)
    if plan.copies:
        copy_blocks(layers, plan.copies)
    write_moves(moves)


def select_tokens(layers: Sequence[KVLayer], shrink: Shrink) -> list[SlotMove]:
    """Return the entries that stay, for each layer of the group; writes nothing."""
    return [select_in_layer(layer, shrink) for layer in layers if layer.group == shrink.group]


def select_in_layer(layer: KVLayer, shrink: Shrink) -> SlotMove:
    """Return the entries of one sequence that stay in one layer."""
    size, device = layer.block_size, layer.k.device
    sources, targets = (
        torch.tensor(blocks, device=device) for blocks in (shrink.sources, shrink.blocks)
    )
    count = shrink.num_tokens - (len(sources) - len(targets)) * size
    k_CGD, _ = layer.gather(sources)
    places_GK = highest_ranked(keydiff_ranks(k_CGD[: shrink.num_tokens]), count)
    to_K = torch.arange(count, device=device)
    return SlotMove(
        layer,
        layer.read(sources[places_GK // size] * size + places_GK % size),
        targets[to_K // size] * size + to_K % size,
    )


def write_moves(moves: Sequence[SlotMove]) -> None:
    """Write the entries to their new slots."""
    for layer, parts, slots_K in moves:
        layer.put(parts, slots_K)


def keydiff_ranks(k_CGD: Tensor) -> Tensor:
    """Return KeyDiff's rank of each key, (C, G): minus its cosine to the mean direction."""
    unit_CGD = functional.normalize(k_CGD.float(), dim=-1)
    mean_GD = functional.normalize(unit_CGD.mean(0), dim=-1)
    return -(unit_CGD * mean_GD).sum(-1)


def highest_ranked(rank_CG: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` tokens that stay, by KV head, (G, count), ascending."""
    rank_CG = rank_CG.where(~rank_CG.isnan(), float("-inf"))
    rank_CG[:FIRST] = rank_CG[len(rank_CG) - min(NEWEST, count) :] = float("inf")
    order_CG = rank_CG.sort(dim=0, descending=True, stable=True).indices
    return order_CG[:count].sort(0).values.T
