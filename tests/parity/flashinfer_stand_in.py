"""FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` in plain torch, as its source documents it.

Its methods have the signatures of flashinfer-python 0.7.2.post1; `test_flashinfer` compares them
with an installed one's, which it reads and does not import. What the real one refuses is refused,
and what it reads it reads: pages by `paged_kv_indices`, lengths as they were planned, in float64.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

KERNEL_HEADS = (64, 128, 256)


class BatchPrefillWithPagedKVCacheWrapper:
    made: list["BatchPrefillWithPagedKVCacheWrapper"] = []  # noqa: RUF012
    types = (torch.float16, torch.bfloat16)

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.dim() == 1
        assert (kv_layout, backend, use_cuda_graph) == ("NHD", "fa2", False), "all that is here"
        self.workspace = float_workspace_buffer
        self.plans: list[dict[str, Any]] = []
        self.num_runs = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ):
        arrays = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in arrays)
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.device == self.workspace.device
        starts, pages, last = (x.tolist() for x in arrays)
        assert len(starts) == len(pages) == len(last) + 1 and starts[0] == pages[0] == 0
        assert len(paged_kv_indices) == pages[-1]
        assert all(1 <= count <= page_size for count in last)
        assert num_qo_heads % num_kv_heads == 0 and head_dim_qk in KERNEL_HEADS
        assert q_data_type in self.types and kv_data_type == q_data_type
        query_lens = [b - a for a, b in pairwise(starts)]
        page_counts = [b - a for a, b in pairwise(pages)]
        tile = cta_tile(sum(query_lens) * (num_qo_heads // num_kv_heads) // len(last), head_dim_qk)
        split = math.inf if disable_split_kv else fixed_split_size
        assert split, "the size of a split would be chosen by the batch"
        seen = [min(count, self.pages_seen(window_left, tile, page_size)) for count in page_counts]
        parts = [max(1, math.ceil(count / split)) for count in seen]
        if max(parts) > 1:
            tiles = [math.ceil(n * num_qo_heads / num_kv_heads / tile) for n in query_lens]
            padded = sum(part * count for part, count in zip(parts, tiles, strict=True))
            rows = math.ceil(padded * tile / (num_qo_heads // num_kv_heads))
            needed = num_qo_heads * rows * (head_dim_qk + 1) * 4
            assert needed <= len(self.workspace), "buffer overflow: batch_prefill_tmp_v"
        self.of = {
            "starts": starts,
            "pages": pages,
            "ids": paged_kv_indices,
            "contexts": [
                (count - 1) * page_size + end for count, end in zip(page_counts, last, strict=True)
            ],
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "causal": causal,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window_left": window_left,
            "cap": logits_soft_cap or 0.0,
            "dtype": q_data_type,
            "split": split * page_size,
            "tile": tile,
        }
        self.plans.append(self.of)

    @staticmethod
    def pages_seen(window_left: int, tile: int, page: int) -> float:
        """How many pages at most are cut into parts."""
        return math.ceil((window_left + tile) / page) if window_left >= 0 else math.inf

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        k, v = paged_kv_cache
        heads, kv_heads, size, page = self.of["heads"]
        assert q.shape == out.shape == (self.of["starts"][-1], heads, size)
        assert q.dtype == k.dtype == out.dtype == self.of["dtype"]
        assert k.shape == v.shape and k.shape[1:] == (page, kv_heads, size)
        self.num_runs += 1
        for row, context in enumerate(self.of["contexts"]):
            begin, end = self.of["starts"][row : row + 2]
            ids = self.of["ids"][self.of["pages"][row] : self.of["pages"][row + 1]]
            keys, values = (x.index_select(0, ids).flatten(0, 1)[:context] for x in (k, v))
            out[begin:end] = self.attended(q[begin:end], keys, values, context).to(out.dtype)
        return out

    def attended(self, q, keys, values, context) -> Tensor:
        """Part by part, as partial softmaxes that are merged."""
        heads, kv_heads, _, _ = self.of["heads"]
        at_T = torch.arange(context - len(q), context, device=q.device)[:, None]
        at_K = torch.arange(context, device=q.device)[None]
        left = self.of["window_left"]
        seen = at_K <= at_T if self.of["causal"] else torch.ones_like(at_K <= at_T)
        seen = seen & (at_K >= at_T - left) if left >= 0 else seen
        repeats = heads // kv_heads
        keys, values = (x.double().repeat_interleave(repeats, 1) for x in (keys, values))
        scores = torch.einsum("tnd,knd->ntk", q.double(), keys) * self.of["scale"]
        if self.of["cap"]:
            scores = self.of["cap"] * torch.tanh(scores / self.of["cap"])
        scores = scores.masked_fill(~seen[None], -math.inf)
        split = int(min(self.of["split"], context))
        outs, weights = [], []
        for first in range(0, context, split):
            part = scores[..., first : first + split]
            lse = part.logsumexp(-1, keepdim=True)
            shares = (part - lse).exp().nan_to_num(0.0)
            outs.append(torch.einsum("ntk,knd->ntd", shares, values[first : first + split]))
            weights.append(lse)
        shares = torch.stack(weights).softmax(0)
        return (shares * torch.stack(outs)).sum(0).transpose(0, 1)


def cta_tile(mean: int, size: int) -> int:
    """FlashInfer's `FA2DetermineCtaTileQ`: queries of all heads of a KV head in a program."""
    if mean > 64 and size < 256:
        return 128
    return 64 if mean > 16 else 16


@contextmanager
def installed(*more: torch.dtype) -> Iterator[list[BatchPrefillWithPagedKVCacheWrapper]]:
    """`flashinfer` is this meanwhile, in two types and `more`; the wrappers that are made."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    BatchPrefillWithPagedKVCacheWrapper.made = made = []
    types = BatchPrefillWithPagedKVCacheWrapper.types + more
    with (
        patch.dict("sys.modules", flashinfer=module),
        patch.object(BatchPrefillWithPagedKVCacheWrapper, "types", types),
    ):
        yield made
