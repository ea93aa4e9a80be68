"""Paged attention through torch's scaled_dot_product_attention, in fp32 on CPUs.

Decodes of similar context are gathered into one call, with the heads that share a KV head as one
query of several rows, so K and V are read once per KV head. Chunks go one by one; their KV head is
broadcast by a stride of 0 and never repeated in memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule, positions_of
from headway.runtime.attention.reference import softmax
from headway.runtime.batch import Batch

SAME_BUCKET = 2.0
"""Largest ratio between contexts of one bucket, so padding at most doubles its work."""


@dataclass(slots=True)
class DecodeView:
    """Decodes of similar context in one KV group: their rows, their live blocks, what they see."""

    at: slice | Tensor
    blocks_RB: Tensor
    mask_R11C: Tensor


class SdpaAttention:
    """Flash attention of torch; see the module."""

    name = "sdpa"
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
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        out = q_TND.new_empty(*q_TND.shape[:2], layer.v.shape[-1])
        for view in decode_views(batch, layer, rule):
            out[view.at] = attend_decodes(q_TND[view.at], layer, view, rule)
        begin = batch.num_decodes
        tables = batch.block_tables_GSB[layer.group]
        for row in range(batch.num_decodes, len(batch.query_lens)):
            end = begin + batch.query_lens[row]
            context = batch.context_lens[row]
            out[begin:end] = attend_chunk(q_TND[begin:end], layer, tables[row], context, rule)
            begin = end
        return out


def decode_views(batch: Batch, layer: KVLayer, rule: AttentionRule) -> list[DecodeView]:
    """Return the decodes of this step by bucket. The first layer of a group makes them for all."""
    if layer.group not in batch.views:
        batch.views[layer.group] = make_views(batch, layer, rule)
    views: list[DecodeView] = batch.views[layer.group]
    return views


def make_views(batch: Batch, layer: KVLayer, rule: AttentionRule) -> list[DecodeView]:
    """Blocks of 4, window 6: a context of 13 sees 7 … 12, in its blocks 1 … 3."""
    block_size = layer.block_size
    tables_SB = batch.block_tables_GSB[layer.group]
    device = tables_SB.device
    contexts = batch.context_lens[: batch.num_decodes]
    blocks_by_row = [rule.visible_blocks(context - 1, context, block_size) for context in contexts]
    lens = [len(blocks) * block_size for blocks in blocks_by_row]
    views = []
    for rows, longest in buckets(lens):
        is_whole_batch = len(rows) == len(batch.query_lens)
        rows_at = slice(None) if is_whole_batch else torch.tensor(rows, device=device)
        num_blocks = -(-longest // block_size)
        context_R1 = torch.tensor([[contexts[row]] for row in rows], device=device)
        if rule.window:
            places_RB, key_at = block_places(blocks_by_row, rows, num_blocks, block_size, device)
            blocks = tables_SB[rows_at].gather(1, places_RB.clamp(max=tables_SB.shape[1] - 1))
        else:
            blocks = tables_SB[rows_at, :num_blocks]
            key_at = torch.arange(num_blocks * block_size, device=device)
        visible = rule.visibility_mask(context_R1 - 1, key_at)
        views.append(DecodeView(rows_at, blocks, visible[:, None, None, :]))
    return views


def block_places(
    blocks_by_row: list[list[int]],
    rows: list[int],
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return (indices in the block table, positions of their slots), one row each, of equal length.

    A row with fewer blocks is padded with blocks behind its last token, which it does not see.
    """
    places = [
        [*blocks, *range(blocks[-1] + 1, blocks[-1] + 1 + num_blocks - len(blocks))]
        for blocks in (blocks_by_row[row] for row in rows)
    ]
    places_RB = torch.tensor(places, device=device)
    within = torch.arange(block_size, device=device)
    return places_RB, (places_RB[:, :, None] * block_size + within).flatten(1)


def attend_decodes(q_RND: Tensor, layer: KVLayer, view: DecodeView, rule: AttentionRule) -> Tensor:
    """Return the attention of one new token for each row of `view`, (R, N, D)."""
    num_rows, num_heads, head_dim = q_RND.shape
    kv_heads = layer.k.shape[2]
    k, v = layer.gather(view.blocks_RB)
    q = upcast(q_RND.view(num_rows, kv_heads, num_heads // kv_heads, head_dim))
    mask = view.mask_R11C.expand(-1, 1, q.shape[2], -1)
    sink_logits = logits_by_group(rule, kv_heads)
    out = masked_attention(
        q, upcast(k).transpose(1, 2), upcast(v).transpose(1, 2), mask, rule, sink_logits
    )
    return out.reshape(num_rows, num_heads, -1).to(q_RND.dtype)


def attend_chunk(
    q_QND: Tensor, layer: KVLayer, table_B: Tensor, context: int, rule: AttentionRule
) -> Tensor:
    """Return the attention of the last Q tokens of a context of one sequence, (Q, N, D)."""
    length, num_heads, head_dim = q_QND.shape
    block_size, kv_heads = layer.k.shape[1:3]
    group = num_heads // kv_heads
    blocks = rule.visible_blocks(context - length, context, block_size)
    first = blocks[0] if len(blocks) == blocks[-1] - blocks[0] + 1 else None
    block_range = blocks if first is None else slice(first, blocks[-1] + 1)
    k, v = layer.gather(table_B[block_range])
    num_keys = len(blocks) * block_size - (-context % block_size)  # without empty slots at the end
    q = upcast(q_QND).view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (
        upcast(x[:num_keys]).permute(1, 0, 2)[:, None].expand(-1, group, -1, -1) for x in (k, v)
    )
    mask = None
    sink_logits = logits_by_group(rule, kv_heads)
    if sink_logits is not None:
        sink_logits = sink_logits[..., None]
    if length != context or rule.softcap or sink_logits is not None or 0 < rule.window < context:
        query_at = torch.arange(context - length, context, device=q.device)[:, None]
        key_at = positions_of(blocks, block_size, q.device)[:num_keys]
        mask = rule.visibility_mask(query_at, key_at)
    out = masked_attention(q, k, v, mask, rule, sink_logits)
    return out.permute(2, 0, 1, 3).reshape(length, num_heads, -1).to(q_QND.dtype)


def logits_by_group(rule: AttentionRule, kv_heads: int) -> Tensor | None:
    """Return the sink logits by KV head and its query heads, (G, N / G, 1)."""
    if rule.sink_logits is None:
        return None
    return upcast(rule.sink_logits).view(kv_heads, -1, 1)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rule: AttentionRule,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Return softmax(cap(q · kᵀ · scale)) · v; no mask means causal.

    torch's function supports neither soft cap nor sink logits; these are computed step by step.
    """
    if rule.softcap or sink_logits is not None:
        assert mask is not None
        return softmax(masked_scores(q, k, mask, rule), sink_logits) @ v
    causal = mask is None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale)


def masked_scores(q: Tensor, k: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Return cap(q · kᵀ · scale), and -inf where the mask hides the key."""
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return scores.masked_fill(~mask, float("-inf"))


def upcast(x: Tensor) -> Tensor:
    """Return fp32 on the CPU, where torch's 16-bit GEMMs are slow or absent; `x` itself on CUDA."""
    return x.float() if x.device.type == "cpu" else x


def buckets(contexts: list[int]) -> list[tuple[list[int], int]]:
    """Group rows of similar context, so that padding at most doubles the work of a bucket.

    [100, 4000, 120, 90] → ([1], 4000), ([2, 0, 3], 120); rows of one bucket keep their order.
    """
    if not contexts:
        return []
    longest = max(contexts)
    if longest <= SAME_BUCKET * min(contexts):
        return [(list(range(len(contexts))), longest)]
    result: list[tuple[list[int], int]] = []
    for row in sorted(range(len(contexts)), key=lambda row: -contexts[row]):
        if not result or contexts[row] * SAME_BUCKET < result[-1][1]:
            result.append(([], contexts[row]))
        result[-1][0].append(row)
    return result
