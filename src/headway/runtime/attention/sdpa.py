"""Paged attention through torch's scaled_dot_product_attention, in fp32 where the CPU is.

Decodes are gathered together, those of like context, with the heads that share a KV head as one
query of several rows, so K and V are read once a group. Chunks go one by one; the KV head is
broadcast by a stride of 0 and never repeated in memory.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch

SAME_BUCKET = 2.0


class SdpaAttention:
    """Flash attention of torch; see the module."""

    name = "sdpa"

    def attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, layer: KVLayer, batch: Batch
    ) -> Tensor:
        layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        tables = batch.block_tables_GSB[layer.group]
        out = torch.empty_like(q_TND)
        for rows, longest in buckets(batch.context_lens[: batch.num_decodes]):
            self._decodes(q_TND, layer, tables, batch.context_lens, rows, longest, out)
        begin = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            end = begin + batch.query_lens[row]
            out[begin:end] = self._chunk(
                q_TND[begin:end], layer, tables[row], batch.context_lens[row]
            )
            begin = end
        return out

    def _decodes(
        self,
        q_TND: Tensor,
        layer: KVLayer,
        tables_SB: Tensor,
        contexts: list[int],
        rows: list[int],
        longest: int,
        out_TND: Tensor,
    ) -> None:
        """One new token each for `rows`, whose contexts are at most `longest`."""
        num_heads, head_dim = q_TND.shape[1:]
        block_size, kv_heads = layer.k.shape[1:3]
        everybody = len(rows) == q_TND.shape[0]
        at = slice(None) if everybody else torch.tensor(rows, device=q_TND.device)
        blocks = tables_SB[at, : -(-longest // block_size)]
        k, v = layer.gather(blocks)
        q = q_TND[at].view(len(rows), kv_heads, num_heads // kv_heads, head_dim)
        lens = torch.tensor([contexts[row] for row in rows], device=q.device)
        mask = torch.arange(k.shape[1], device=q.device)[None, :] < lens[:, None]
        attended = scaled_dot_product_attention(
            working(q),
            working(k).transpose(1, 2),
            working(v).transpose(1, 2),
            attn_mask=mask[:, None, None, :].expand(-1, 1, q.shape[2], -1),
        )
        out_TND[at] = attended.reshape(len(rows), num_heads, head_dim).to(out_TND.dtype)

    def _chunk(self, q_QND: Tensor, layer: KVLayer, table_B: Tensor, context: int) -> Tensor:
        """Several tokens of one sequence that see `context` tokens at the end."""
        length, num_heads, head_dim = q_QND.shape
        block_size, kv_heads = layer.k.shape[1:3]
        k, v = layer.gather(table_B[: -(-context // block_size)])
        group = num_heads // kv_heads
        q = working(q_QND).view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        k, v = (
            working(x[:context]).permute(1, 0, 2)[:, None].expand(-1, group, -1, -1) for x in (k, v)
        )
        mask = None
        if length != context:
            query_at = torch.arange(context - length, context, device=q.device)
            mask = torch.arange(context, device=q.device)[None, :] <= query_at[:, None]
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return attended.permute(2, 0, 1, 3).reshape(q_QND.shape).to(q_QND.dtype)


def working(x: Tensor) -> Tensor:
    """fp32 on the CPU, where torch's narrow products are slow or absent; as it is on CUDA."""
    return x.float() if x.device.type == "cpu" else x


def buckets(contexts: list[int]) -> list[tuple[list[int], int]]:
    """Rows of like context, so that padding at most doubles a bucket's work.

    [100, 4000, 120, 90] → ([1], 4000), ([2, 0, 3], 120); all alike keep their order.
    """
    if not contexts:
        return []
    longest = max(contexts)
    if longest <= SAME_BUCKET * min(contexts):
        return [(list(range(len(contexts))), longest)]
    found: list[tuple[list[int], int]] = []
    for row in sorted(range(len(contexts)), key=lambda row: -contexts[row]):
        if not found or contexts[row] * SAME_BUCKET < found[-1][1]:
            found.append(([], contexts[row]))
        found[-1][0].append(row)
    return found
