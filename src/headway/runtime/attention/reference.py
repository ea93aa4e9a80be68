"""Paged attention in plain torch, one sequence at a time, in fp32: the definition of correct."""

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer, write
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
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        if isinstance(layer, Int4KVLayer):
            write(layer.open, k_TGD, v_TGD, batch.slots_GT[layer.open.group])
            layer.round(filled_blocks(batch, layer))
            return attend_rounded(q_TND, layer, batch, rule)
        write(layer, k_TGD, v_TGD, batch.slots_GT[layer.group])
        tables = batch.block_tables_GSB[layer.group]
        block_size = layer.block_size
        out = torch.empty_like(q_TND)
        begin = 0
        for row, (length, context) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            blocks = rule.blocks_read(context - length, context, block_size)
            k, v = layer.gather(tables[row, blocks])
            key_at = positions_of(blocks, block_size, q_TND.device)
            live = key_at < context
            q = q_TND[begin : begin + length]
            found = attend_at(q, k[live], v[live], rule, key_at[live], context)
            out[begin : begin + length] = found
            begin += length
        return out


def attend_rounded(q_TND: Tensor, layer: Int4KVLayer, batch: Batch, rule: AttentionRule) -> Tensor:
    """Each query reads the block that it lies in as it was computed, and those before it rounded.

    One block of one sequence after the other, (T, N, D); this step's K and V are written.
    """
    size, out, at = layer.block_size, torch.empty_like(q_TND), 0
    tables, open_tables = (batch.block_tables_GSB[one.group] for one in (layer, layer.open))
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        position = context - length
        while position < context:
            block = position // size
            end = min((block + 1) * size, context)
            first = rule.first_seen(position) // size
            rounded = layer.gather(tables[row, first:block])
            exact = layer.open.gather(open_tables[row, block : block + 1])
            live = end - block * size
            k, v = (
                torch.cat([old, new[:live].float()])
                for old, new in zip(rounded, exact, strict=True)
            )
            count = end - position
            out[at : at + count] = attend_one(q_TND[at : at + count], k, v, rule)
            at, position = at + count, end
    return out


def attend_one(q_QND: Tensor, k_CGD: Tensor, v_CGD: Tensor, rule: AttentionRule) -> Tensor:
    """Causal attention of the last Q of C consecutive positions, (Q, N, D)."""
    context = len(k_CGD)
    key_at = torch.arange(context, device=q_QND.device)
    return attend_at(q_QND, k_CGD, v_CGD, rule, key_at, context)


def attend_at(
    q_QND: Tensor, k_CGD: Tensor, v_CGD: Tensor, rule: AttentionRule, key_at_C: Tensor, context: int
) -> Tensor:
    """Attention of the Q positions up to `context` to keys at these positions, (Q, N, D)."""
    length, num_heads, head_dim = q_QND.shape
    kv_heads = k_CGD.shape[1]
    q = q_QND.float().view(length, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.einsum("qgnd,cgd->gnqc", q, k_CGD.float()) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    query_at = torch.arange(context - length, context, device=q.device)[:, None]
    seen = rule.sees(query_at, key_at_C[None, :])
    scores, logits = scores.masked_fill(~seen, float("-inf")), rule.sink_logits
    weights = softmax(scores, None if logits is None else logits.float().view(kv_heads, -1, 1, 1))
    out = torch.einsum("gnqc,cgd->qgnd", weights, v_CGD.float())
    return out.reshape(length, num_heads, head_dim).to(q_QND.dtype)


def softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of the keys, the last dim; `sink_logits` has a 1 there and fits the others."""
    if sink_logits is None:
        return scores.softmax(-1)
    logits = sink_logits.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
