"""Paged attention in plain torch, one sequence at a time, in fp32: the definition of correct."""

from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.int4 import Int4KVLayer, filled_blocks
from headway.runtime.attention.protocol import AttentionRule, positions_of
from headway.runtime.batch import Batch


class ReferenceAttention:
    """Scores, mask, softmax, sum; nothing fused, nothing batched."""

    name = "reference"
    kv_layer: type[KVLayer] = KVLayer

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        if isinstance(layer, Int4KVLayer):
            if k_TGD is not None and v_TGD is not None:
                layer.open.write(k_TGD, v_TGD, batch.slots_GT[layer.open.group])
                layer.round(filled_blocks(batch, layer))
            return attend_rounded(q_TND, layer, batch, rule)
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        tables = batch.block_tables_GSB[layer.group]
        out = q_TND.new_empty(*q_TND.shape[:2], layer.v.shape[-1])
        begin = 0
        for run in query_runs(batch, layer):
            q, end = q_TND[begin : begin + run.length], begin + run.length
            if run.num_read:
                out[begin] = attend_best_blocks(q[0], layer, tables[run.row], rule, run)
            else:
                blocks = rule.visible_blocks(
                    run.context - run.length, run.context, layer.block_size
                )
                out[begin:end] = attend_blocks(q, layer, tables[run.row], rule, run.context, blocks)
            begin = end
        return out


class QueryRun(NamedTuple):
    """Tokens of one row, the last at `context` - 1; `num_read` 0 means all blocks."""

    row: int
    length: int
    context: int
    num_read: int = 0


def query_runs(batch: Batch, layer: KVLayer) -> list[QueryRun]:
    """Return the rows; with bounds, each token that reads fewer blocks is one run."""
    lens = zip(batch.query_lens, batch.contexts(layer.group), strict=True)
    if batch.reads_T is None or layer.bounds is None:
        return [QueryRun(row, length, context) for row, (length, context) in enumerate(lens)]
    runs, reads = [], iter(batch.reads_T.tolist())
    for row, (length, context) in enumerate(lens):
        each = list(islice(reads, length))
        whole = each.count(0)  # they come first: a context grows
        if whole:
            runs.append(QueryRun(row, whole, context - length + whole))
        ends = range(context - length + whole + 1, context + 1)
        runs += [
            QueryRun(row, 1, end, count) for end, count in zip(ends, each[whole:], strict=True)
        ]
    return runs


def attend_blocks(
    q_QND: Tensor,
    layer: KVLayer,
    table_B: Tensor,
    rule: AttentionRule,
    context: int,
    blocks: list[int],
) -> Tensor:
    """Return the attention of the last Q positions below `context` to these blocks of a table."""
    k, v = layer.gather(table_B[blocks])
    key_at = positions_of(blocks, layer.block_size, q_QND.device)
    live = key_at < context
    return attend_positions(q_QND, k[live], v[live], rule, key_at[live], context)


def attend_best_blocks(
    q_ND: Tensor, layer: KVLayer, table_B: Tensor, rule: AttentionRule, run: QueryRun
) -> Tensor:
    """Return the attention of one token to its best blocks, chosen per KV head, (N, D)."""
    assert layer.bounds is not None
    count = -(-run.context // layer.block_size)
    bounds_BG2D = layer.bounds[table_B[: count - 1]]
    q_GRD = q_ND.unflatten(0, (bounds_BG2D.shape[1], -1))
    chosen_GK = best_blocks(q_GRD, bounds_BG2D, run.num_read)
    outputs = [
        attend_blocks(q_ND[None], layer, table_B, rule, run.context, chosen.tolist())[0]
        for chosen in chosen_GK
    ]
    return torch.cat([x.unflatten(0, q_GRD.shape[:2])[g] for g, x in enumerate(outputs)])


def best_blocks(q_GRD: Tensor, bounds_BG2D: Tensor, num_read: int) -> Tensor:
    """Return the blocks that a token reads, by KV head, (G, num_read), in ascending order.

    `bounds_BG2D` are those of all blocks except the token's own, which it always reads. Of equal
    blocks the first is taken.
    """
    up_GD, down_GD = (half.clamp(min=0).sum(1) for half in (q_GRD.float(), -q_GRD.float()))
    least_BGD, most_BGD = bounds_BG2D.float().unbind(2)
    scores_BG = (up_GD * most_BGD - down_GD * least_BGD).sum(-1)
    scores_BG = scores_BG.where(~scores_BG.isnan(), float("-inf"))
    scores_BG[0] = float("inf")
    order_BG = scores_BG.sort(dim=0, descending=True, stable=True).indices
    own = order_BG.new_full((1, len(q_GRD)), len(bounds_BG2D))
    return torch.cat([order_BG[: num_read - 1], own]).sort(0).values.T


def attend_rounded(q_TND: Tensor, layer: Int4KVLayer, batch: Batch, rule: AttentionRule) -> Tensor:
    """Return attention, (T, N, D), where a query reads its own block unrounded and earlier ones
    rounded.

    It goes block by block of one sequence after the other; K and V of this step are written.
    """
    size, out, at = layer.block_size, torch.empty_like(q_TND), 0
    tables, open_tables = (batch.block_tables_GSB[one.group] for one in (layer, layer.open))
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        position = context - length
        while position < context:
            block = position // size
            end = min((block + 1) * size, context)
            first = rule.first_visible(position) // size
            rounded = layer.gather(tables[row, first:block])
            exact = layer.open.gather(open_tables[row, block : block + 1])
            live = end - block * size
            k, v = (
                torch.cat([old, new[:live].float()])
                for old, new in zip(rounded, exact, strict=True)
            )
            count = end - position
            out[at : at + count] = causal_attention(q_TND[at : at + count], k, v, rule)
            at, position = at + count, end
    return out


def causal_attention(q_QND: Tensor, k_CGD: Tensor, v_CGD: Tensor, rule: AttentionRule) -> Tensor:
    """Return the causal attention of the last Q of C consecutive positions, (Q, N, D)."""
    context = len(k_CGD)
    key_at = torch.arange(context, device=q_QND.device)
    return attend_positions(q_QND, k_CGD, v_CGD, rule, key_at, context)


def attend_positions(
    q_QND: Tensor, k_CGD: Tensor, v_CGD: Tensor, rule: AttentionRule, key_at_C: Tensor, context: int
) -> Tensor:
    """Return attention of the last Q positions below `context` to these keys, (Q, N, D)."""
    weights_GRQC = attention_weights(q_QND, k_CGD, rule, key_at_C, context)
    out = torch.einsum("gnqc,cgd->qgnd", weights_GRQC, v_CGD.float())
    return out.reshape(*q_QND.shape[:2], -1).to(q_QND.dtype)


def attention_weights(
    q_QND: Tensor, k_CGD: Tensor, rule: AttentionRule, key_at_C: Tensor, context: int
) -> Tensor:
    """Return the weights in `attend_positions`, by KV head and query head, (G, N / G, Q, C)."""
    length, num_heads, head_dim = q_QND.shape
    kv_heads = k_CGD.shape[1]
    q = q_QND.float().view(length, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.einsum("qgnd,cgd->gnqc", q, k_CGD.float()) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    query_at = torch.arange(context - length, context, device=q.device)[:, None]
    visible = rule.visibility_mask(query_at, key_at_C[None, :])
    scores, logits = scores.masked_fill(~visible, float("-inf")), rule.sink_logits
    return softmax(scores, None if logits is None else logits.float().view(kv_heads, -1, 1, 1))


def softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the weights of the keys; the last dimension of `sink_logits` is 1."""
    if sink_logits is None:
        return scores.softmax(-1)
    logits = sink_logits.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
