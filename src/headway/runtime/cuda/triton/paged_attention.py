"""Attention over paged KV: any head size, soft cap, windows, int8 KV.

The tokens of a chunk go through the keys they see in one pass. A step of decodes cuts each context
into splits of SPLIT keys at fixed places, whatever the batch, and computes them in parallel. Each
split has a maximum m, a sum l and a weighted value; a second kernel merges them in order:

    M' = max(M, m)     L' = L · e^(M - M') + l · e^(m - M')     and likewise the values

A program has the rows of BLOCK_Q tokens of one sequence, and HEADS query heads of one KV head.
Where values are the first D numbers of their keys (latent attention) they are read once; the E
numbers behind them belong to the rope. T tokens, S sequences, N query heads, G KV heads, D size of
a value, P splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runtime.cuda.triton.types import TYPES, dot_type, power_of_two

SPLIT = 512
"""Keys of one split, as on the CPU."""
CHUNK_WARPS = 8
"""With 4 the tile of a chunk spills registers on compute capability 8.0."""
LATENT_HEADS, LATENT_KEYS, LATENT_WARPS = 16, 32, 4
"""Rows, keys and warps of a program over latent rows of 512 + 64 numbers."""
NOTHING = tl.constexpr(-1.0e30)
"""The maximum of no score: finite, so that no difference of two is NaN."""


@triton.jit
def attend_kernel(
    out, part_out, part_max, part_sum,
    q, k, v, k_scale, v_scale, starts, contexts, table, sink_logits,
    num_seqs, num_tokens, table_width, q_stride, scale, softcap, window, sinks,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, APART: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, SINK_LOGITS: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = N // G
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    KEY: tl.constexpr = D + E
    pid, g = tl.program_id(0), tl.program_id(1) // PARTS
    low, high = 0, num_seqs  # the last sequence whose tiles begin at or before this program
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= pid:
            low = middle + 1
        else:
            high = middle
    s = low - 1
    begin = tl.load(starts + s)
    length = tl.load(starts + s + 1) - begin
    first = (pid - (begin // BLOCK_Q + s)) * BLOCK_Q
    if first < length:
        context = tl.load(contexts + s)
        rows = tl.arange(0, BLOCK_M)
        at_q = first + rows // HEADS
        own = tl.program_id(1) % PARTS * HEADS + rows % HEADS
        head = g * GROUP + own
        live = (rows < BLOCK_Q * HEADS) & (at_q < length) & (own < GROUP)
        position = context - length + at_q
        d = tl.arange(0, BLOCK_D)
        place = (begin + at_q).to(tl.int64)
        own_q = q + place[:, None] * q_stride + head[:, None] * KEY
        queries = tl.load(own_q + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        queries = queries.to(tl.float32).to(DOT)
        if E:
            e = tl.arange(0, BLOCK_E)
            turned = tl.load(own_q + D + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0)
            turned = turned.to(tl.float32).to(DOT)
        end = tl.minimum(context - length + first + BLOCK_Q, context)
        visible_from = 0
        if WINDOW:
            visible_from = tl.maximum(context - length + first - window + 1, 0)
            if SINKS:
                visible_from = 0
        least, most = visible_from // BLOCK_N * BLOCK_N, end
        if APART:
            least = tl.maximum(least, tl.program_id(2) * SPLIT_KEYS)
            most = tl.minimum(most, (tl.program_id(2) + 1) * SPLIT_KEYS)
        M = tl.full((BLOCK_M,), NOTHING, tl.float32)
        L = tl.zeros((BLOCK_M,), tl.float32)
        values = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for at in range(least, most, BLOCK_N):
            key = at + tl.arange(0, BLOCK_N)
            there = key < end
            block = tl.load(table + s * table_width + key // PAGE, mask=there, other=0)
            slot = block.to(tl.int64) * PAGE + key % PAGE
            in_memory = (slot * G + g)[:, None] * KEY + d[None, :]
            both = there[:, None] & (d < D)[None, :]
            keys = tl.load(k + in_memory, mask=both, other=0.0).to(tl.float32)
            vals = keys
            if not E:
                vals = tl.load(v + in_memory, mask=both, other=0.0).to(tl.float32)
            if INT8:
                keys = keys * tl.load(k_scale + slot * G + g, mask=there, other=0.0)[:, None]
                vals = vals * tl.load(v_scale + slot * G + g, mask=there, other=0.0)[:, None]
            scores = tl.dot(queries, tl.trans(keys.to(DOT)), input_precision="ieee")
            if E:
                in_memory = (slot * G + g)[:, None] * KEY + D + e[None, :]
                ropes = tl.load(k + in_memory, mask=there[:, None] & (e < E)[None, :], other=0.0)
                ropes = tl.trans(ropes.to(tl.float32).to(DOT))
                scores = tl.dot(turned, ropes, acc=scores, input_precision="ieee")
            scores = scores * scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            visible = key[None, :] <= position[:, None]
            if WINDOW:
                near = key[None, :] > position[:, None] - window
                if SINKS:
                    near = near | (key < sinks)[None, :]
                visible = visible & near
            scores = tl.where(visible & live[:, None], scores, float("-inf"))
            new_max = tl.maximum(M, tl.max(scores, 1))
            weights = tl.exp(scores - new_max[:, None])
            fade = tl.exp(M - new_max)
            L = L * fade + tl.sum(weights, 1)
            values = values * fade[:, None] + tl.dot(
                weights.to(DOT), vals.to(DOT), input_precision="ieee"
            )
            M = new_max
        if APART:
            split_at = tl.program_id(2).to(tl.int64) * num_tokens + place
            row_at = split_at * N + head
            tl.store(part_max + row_at, M, mask=live)
            tl.store(part_sum + row_at, L, mask=live)
            tl.store(
                part_out + row_at[:, None] * D + d[None, :], values,
                mask=live[:, None] & (d < D)[None, :],
            )  # fmt: skip
        else:
            if SINK_LOGITS:
                logit = tl.load(sink_logits + head, mask=live, other=0.0).to(tl.float32)
                top = tl.maximum(M, logit)
                values = values * tl.exp(M - top)[:, None]
                L = L * tl.exp(M - top) + tl.exp(logit - top)
            L = tl.where(L > 0, L, 1.0)
            tl.store(
                out + place[:, None] * (N * D) + head[:, None] * D + d[None, :],
                (values / L[:, None]).to(TYPE), mask=live[:, None] & (d < D)[None, :],
            )  # fmt: skip


@triton.jit
def merge_kernel(
    out, part_out, part_max, part_sum, sink_logits, num_tokens, num_splits,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINK_LOGITS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token and head in order; empty ones change nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    M = tl.full((1,), NOTHING, tl.float32)
    L = tl.zeros((1,), tl.float32)
    values = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(num_splits):
        row = (split * num_tokens + token) * N + head
        m = tl.load(part_max + row)
        l = tl.load(part_sum + row)
        part = tl.load(part_out + row * D + d, mask=d < D, other=0.0)
        top = tl.maximum(M, m)
        old, new = tl.exp(M - top), tl.exp(m - top)
        L = L * old + l * new
        values = values * old + part * new
        M = top
    if SINK_LOGITS:
        logit = tl.load(sink_logits + head).to(tl.float32)
        top = tl.maximum(M, logit)
        values = values * tl.exp(M - top)
        L = L * tl.exp(M - top) + tl.exp(logit - top)
    L = tl.where(L > 0, L, 1.0)
    tl.store(out + (token * N + head) * D + d, (values / L).to(TYPE), mask=d < D)


class Tile(NamedTuple):
    """Query heads, tokens, rows, keys per pass, padded sizes of value and rope, warps."""

    heads: int
    block_q: int
    block_m: int
    block_n: int
    block_d: int
    block_e: int
    warps: int


def tile_of(group: int, size: int, more: int, decodes: bool) -> Tile:
    """Return the tile of a layer: all query heads of a KV head, or LATENT_HEADS of a latent row.

    A latent row is so long that few rows of queries fit, so chunks have the tile of decodes.
    """
    block_d, block_e = max(power_of_two(size), 16), max(power_of_two(more), 16)
    if more:
        heads = min(group, LATENT_HEADS)
        return Tile(heads, 1, LATENT_HEADS, LATENT_KEYS, block_d, block_e, LATENT_WARPS)
    block_m = max(16 if decodes else 64, power_of_two(group))
    block_q, block_n = 1 if decodes else block_m // group, 64 if block_d <= 128 else 32
    return Tile(group, block_q, block_m, block_n, block_d, block_e, 4 if decodes else CHUNK_WARPS)


def paged_attention(
    q_TND: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    starts_S1: Tensor,
    context_lens_S: Tensor,
    table_SB: Tensor,
    longest_query: int,
    longest_context: int,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: int = 0,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention (T, N, D), in `out` if given; lengths and table are int32, on the
    device.

    k and v are (blocks, page, G, D). Where v is a view of k's first numbers, k and the queries have
    D + E. `scales` of int8 keys and values are fp32, (blocks, page, G).
    """
    tokens, heads, key_size = q_TND.shape
    page, kv_heads, size = v.shape[1:]
    if q_TND.stride(2) != 1 or q_TND.stride(1) != key_size:
        q_TND = q_TND.contiguous()
    if out is None:
        out = torch.empty(tokens, heads, size, dtype=q_TND.dtype, device=q_TND.device)
    decodes = longest_query == 1
    tile = tile_of(heads // kv_heads, size, key_size - size, decodes)
    num_splits = triton.cdiv(longest_context, SPLIT) if decodes else 1
    apart = num_splits > 1
    shape = (num_splits, tokens, heads) if apart else (1, 1, 1)
    part_out = torch.empty(*shape, size, dtype=torch.float32, device=q_TND.device)
    part_max, part_sum = torch.empty(2, *shape, dtype=torch.float32, device=q_TND.device)
    num_seqs, group = context_lens_S.shape[0], heads // kv_heads
    k_scale, v_scale = scales or (part_max, part_max)
    logits = part_max if sink_logits is None else sink_logits
    tiles = tokens // tile.block_q + num_seqs
    attend_kernel[(tiles, kv_heads * triton.cdiv(group, tile.heads), num_splits)](
        out, part_out, part_max, part_sum,
        q_TND, k, v, k_scale, v_scale, starts_S1, context_lens_S, table_SB, logits,
        num_seqs, tokens, table_SB.stride(0), q_TND.stride(0), scale, softcap, window, sinks,
        heads, kv_heads, size, tile.block_d, key_size - size, tile.block_e, tile.heads, page,
        tile.block_q, tile.block_m, tile.block_n, SPLIT, apart,
        softcap > 0, window > 0, sinks > 0, sink_logits is not None, scales is not None,
        dot_type(q_TND.dtype), TYPES[q_TND.dtype],
        num_warps=tile.warps, num_stages=2,
    )  # fmt: skip
    if apart:
        merge_kernel[(tokens, heads)](
            out, part_out, part_max, part_sum, logits, tokens, num_splits,
            heads, size, tile.block_d, sink_logits is not None, TYPES[q_TND.dtype], num_warps=4,
        )  # fmt: skip
    return out
