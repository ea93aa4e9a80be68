"""What a prompt's queries look at: the scores by which some methods choose what is kept of it.

Of a KV head, the score of key c is the sum of the weights that the queries that are watched, of all
its query heads, give it in their softmax. They are watched as they are computed, in tiles by
position: a tile is weighed once, when its last query is there, whatever chunks they came in, so
that the sums have the same bits in any. Worked example, tiles of 64, a prompt of 100 tokens, all of
which are watched:

    chunk of 40    tokens 0 … 39 wait
    chunk of 40    0 … 63 are weighed with the keys 0 … 63; 64 … 79 wait
    chunk of 20    64 … 99 are weighed with all 100 keys

Q queries, C keys, G KV heads, N query heads, D numbers of a key.
"""

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.attention.reference import weights_at
from headway.runtime.watched import Watch, Watched

TILE = 64


def see(
    watch: Watch,
    index: int,
    layer: KVLayer,
    tables_GSB: list[Tensor],
    rule: AttentionRule,
    q_TND: Tensor,
) -> None:
    """The queries of layer `index`, whose keys of this step are written."""
    if layer.group not in watch.groups:
        return
    for watched, row, at, position, length in watch.rows:
        table_B = tables_GSB[layer.group][row]
        look(watched, index, layer, table_B, rule, q_TND[at : at + length], position)


def look(
    watched: Watched,
    index: int,
    layer: KVLayer,
    table_B: Tensor,
    rule: AttentionRule,
    q_QND: Tensor,
    position: int,
) -> None:
    """The queries of one sequence from `position` on: wait, or are weighed with their tile."""
    if index not in watched.waiting:
        watched.waiting[index] = q_QND.new_empty(TILE, *q_QND.shape[1:])
    waiting, taken = watched.waiting[index], 0
    while taken < len(q_QND):
        within = (position + taken - watched.begin) % TILE
        first = position + taken - within
        size = min(TILE, watched.end - first)
        count = min(len(q_QND) - taken, size - within)
        waiting[within : within + count] = q_QND[taken : taken + count]
        taken += count
        if within + count == size:
            weights_GC = weigh(layer, table_B, rule, waiting[:size], first + size)
            if index not in watched.scores:
                watched.scores[index] = weights_GC.new_zeros(len(weights_GC), watched.end)
            watched.scores[index][:, : first + size] += weights_GC
    if position + taken == watched.end:
        del watched.waiting[index]


def weigh(
    layer: KVLayer, table_B: Tensor, rule: AttentionRule, q_QND: Tensor, context: int
) -> Tensor:
    """By KV head the weight of each of `context` keys, in the sum over the last queries, (G, C)."""
    blocks_B = table_B[: -(-context // layer.block_size)]
    k_CGD = layer.gather(blocks_B)[0][:context].float().contiguous()
    key_at_C = torch.arange(context, device=k_CGD.device)
    return weights_at(q_QND, k_CGD, rule, key_at_C, context).sum((1, 2))
