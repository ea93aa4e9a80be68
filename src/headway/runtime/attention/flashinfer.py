"""Paged attention by FlashInfer, the extra `flashinfer`, on CUDA only.

FlashInfer plans a step on the host from its lengths, then runs the plan in each layer of a KV
group. Its tile depends on the mean query length of what is planned together. So decodes and chunks
are planned separately, and a decode has the same tile in every batch. Contexts of decodes are split
at fixed places; those of chunks are not split. Example with pages of 16: a decode with 41 tokens of
context, one with 3, and a chunk of 5 tokens behind 28:

    decodes   query starts [0 1 2]   page starts [0 3 4]   tokens of the last page [9 3]
    chunk     query starts [0 5]     page starts [0 3]     tokens of the last page [1]
    pages     the tables without padding: [t00 t01 t02 t10] and [t20 t21 t22]

A plan is copied to the device from pinned memory that its wrapper owns and overwrites with its next
plan. So there are two wrappers, as many as steps in flight, and a wrapper is planned again only
after the event of its last copy. FlashInfer supports neither sinks, latent rows, rounded KV nor
other head sizes; `config.attention_choice` does not choose it for these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.config.resolve import Settings
from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch
from headway.spec import ModelSpec

SPLIT_TOKENS = 2048
"""Tokens of one split of a decode's context."""
WRAPPERS_PER_PLAN = 2
PLAN_BYTES_PER_WRAPPER = 8 * 2**20
"""Device memory that a wrapper takes for its plan."""
WORKSPACE_STEP_BYTES = 32 * 2**20


class Span(NamedTuple):
    """Sequences that are planned together, and their tokens."""

    kind: str
    sequences: slice
    tokens: slice


class Lengths(NamedTuple):
    """Lengths of a step on the host; contexts and block tables of a group on the device."""

    query_lens: list[int]
    num_decodes: int
    contexts: list[int]
    contexts_S: Tensor
    table_SB: Tensor


@dataclass(slots=True)
class WrapperSlot:
    """A wrapper, and the event after which its last plan has left the host."""

    wrapper: Any
    copy_event: torch.cuda.Event | None = None


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper` with its FlashAttention-2 kernels, for every step."""

    name = "flashinfer"
    kv_layer: type[KVLayer] = KVLayer

    def __init__(self) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper_class = BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        self._slots: dict[tuple[Any, ...], list[WrapperSlot]] = {}

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        assert batch.lens is not None
        assert not (rule.sinks or rule.sink_logits is not None)
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        views, q_TND = batch.views.setdefault(layer.group, {}), q_TND.contiguous()
        key = rule, q_TND.shape[1]
        if key not in views:
            table_SB = batch.lens.tables_GSB[layer.group]
            on_host = batch.query_lens, batch.num_decodes, batch.context_lens
            lengths = Lengths(*on_host, batch.lens.context_lens_S, table_SB)
            views[key] = self._plan(layer.group, lengths, q_TND, layer.k, rule)
        return run_plans(views[key], q_TND, layer.k, layer.v)

    def attend_paged(
        self,
        q_TND: Tensor,
        k: Tensor,
        v: Tensor,
        starts_S1: Tensor,
        context_lens_S: Tensor,
        table_SB: Tensor,
        longest_query: int,
        longest_context: int,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Run one call with the arguments of `triton.paged_attention`, for probes and comparisons.
        The lengths are read back from the device to be planned."""
        query_lens = starts_S1.diff().tolist()
        longer = [at for at, length in enumerate(query_lens) if length > 1]
        decodes = min(longer, default=len(query_lens))
        contexts = context_lens_S.tolist()
        lengths = Lengths(query_lens, decodes, contexts, context_lens_S, table_SB)
        scale = q_TND.shape[-1] ** -0.5 if scale is None else scale
        rule = AttentionRule(scale=scale, window=window, softcap=softcap)
        return run_plans(self._plan(-1, lengths, q_TND, k, rule), q_TND.contiguous(), k, v)

    def _plan(
        self, group: int, lengths: Lengths, q_TND: Tensor, k: Tensor, rule: AttentionRule
    ) -> list[tuple[Span, Any]]:
        """Return a planned wrapper for the decodes and one for the chunks, where there are some."""
        page, (kv_heads, size) = k.shape[1], k.shape[2:]
        pages = page_counts(lengths.contexts[: lengths.num_decodes], page)
        bytes_of = partial(workspace_bytes, q_TND.shape[1], size, kv_heads)
        self._reserve_workspace(pages, page, bytes_of, k.device)
        plans = []
        for span in spans_of(lengths.query_lens, lengths.num_decodes):
            slot = self._next_slot(span.kind, group, rule, q_TND.shape[1], k.device)
            slot.wrapper.plan(
                *layout(lengths, span.sequences, page),
                q_TND.shape[1],
                kv_heads,
                size,
                page,
                causal=True,
                sm_scale=rule.scale,
                window_left=rule.window - 1 if rule.window else -1,
                logits_soft_cap=rule.softcap,
                q_data_type=q_TND.dtype,
                kv_data_type=k.dtype,
                fixed_split_size=max(1, SPLIT_TOKENS // page) if span.kind == "decodes" else None,
                disable_split_kv=span.kind == "chunks",
            )
            if k.is_cuda:
                slot.copy_event = torch.cuda.Event()
                slot.copy_event.record()
            plans.append((span, slot.wrapper))
        return plans

    def _next_slot(self, *key: Any) -> WrapperSlot:
        """Return the next wrapper for plans of this kind, once it may be planned again."""
        slots = self._slots.setdefault(key, [])
        if len(slots) < WRAPPERS_PER_PLAN:
            slots.append(WrapperSlot(self._wrapper_class(self._workspace, "NHD", backend="fa2")))
        else:
            slots.append(slots.pop(0))
        if slots[-1].copy_event is not None:
            slots[-1].copy_event.synchronize()
        return slots[-1]

    def _reserve_workspace(
        self, pages: list[int], page: int, bytes_of: Callable[[int], int], device: torch.device
    ) -> None:
        """Make the workspace large enough for these decodes; a new one needs new wrappers."""
        needed = bytes_of(sum(page_counts(pages, max(1, SPLIT_TOKENS // page))))
        if self._workspace is not None and len(self._workspace) >= needed:
            return
        for slot in (slot for slots in self._slots.values() for slot in slots):
            if slot.copy_event is not None:
                slot.copy_event.synchronize()
        self._slots.clear()
        self._workspace = None
        self._workspace = torch.empty(
            -(-needed // WORKSPACE_STEP_BYTES) * WORKSPACE_STEP_BYTES,
            dtype=torch.uint8,
            device=device,
        )


def run_plans(plans: list[tuple[Span, Any]], q_TND: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of all spans, in one output."""
    out = torch.empty_like(q_TND)
    for span, wrapper in plans:
        wrapper.run(q_TND[span.tokens], (k, v), out=out[span.tokens])
    return out


def spans_of(query_lens: list[int], num_decodes: int) -> list[Span]:
    """Return the decodes, which come first, and the rest.

    >>> [tuple(span) for span in spans_of([1, 1, 5], 2)]
    [('decodes', slice(0, 2, None), slice(0, 2, None)), ('chunks', slice(2, 3, None), \
    slice(2, 7, None))]
    """
    rows, tokens = len(query_lens), sum(query_lens)
    decodes = Span("decodes", slice(0, num_decodes), slice(0, num_decodes))
    chunks = Span("chunks", slice(num_decodes, rows), slice(num_decodes, tokens))
    return [*[decodes] * bool(num_decodes), *[chunks] * (num_decodes < rows)]


def layout(lengths: Lengths, sequences: slice, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (query starts, page starts, page ids, tokens of the last page) of sequences, in int32.

    The page ids are on the device; the rest is on the host, where the plan is made.
    """
    contexts = lengths.contexts[sequences]
    pages = page_counts(contexts, page)
    return (
        offsets_of(lengths.query_lens[sequences]),
        offsets_of(pages),
        page_ids(lengths.table_SB[sequences], lengths.contexts_S[sequences], page, sum(pages)),
        torch.tensor([(context - 1) % page + 1 for context in contexts], dtype=torch.int32),
    )


def offsets_of(lengths: list[int]) -> Tensor:
    """Return begins and the last end of lengths, int32 on the host: [3, 1] → [0, 3, 4]."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def page_counts(contexts: list[int], page: int) -> list[int]:
    """Return how many pages each context occupies."""
    return [-(-context // page) for context in contexts]


def page_ids(table_SB: Tensor, contexts_S: Tensor, page: int, count: int) -> Tensor:
    """Return the `count` page ids of the table's rows, concatenated without padding; int32.

    Nothing is read back: contexts and table are on the device.
    """
    counts_S = (contexts_S + (page - 1)) // page
    ends_S = counts_S.cumsum(0)
    at = torch.arange(count, device=table_SB.device)
    row = torch.searchsorted(ends_S, at, right=True)
    within = at - (ends_S - counts_S).index_select(0, row)
    return table_SB.flatten().index_select(0, row * table_SB.shape[1] + within)


def workspace_bytes(heads: int, size: int, kv_heads: int, parts: int) -> int:
    """Return the bytes that FlashInfer's plan of decodes takes for `parts` splits.

    A split is a tile of queries of all heads (16 rows where a KV head has at most 16 query heads)
    with its sum of exponentials, in fp32. With 32 query heads and 8 KV heads of 128 channels it is
    66,048 bytes.
    """
    each = heads // kv_heads
    tile = 16 if each <= 16 else 64 if each <= 64 or size >= 256 else 128
    return heads * -(-parts * tile // each) * (size + 1) * 4 + 32


def workspace_and_plan_bytes(spec: ModelSpec, settings: Settings) -> int:
    """Return the most device memory that the workspace and the plans of all KV groups take."""
    parts = settings.max_num_seqs * -(-settings.max_model_len // SPLIT_TOKENS)
    needed = max(
        workspace_bytes(spec.num_heads, group.head_dim, group.num_kv_heads, parts)
        for group in spec.kv_groups
    )
    plans = 2 * WRAPPERS_PER_PLAN * len(spec.kv_groups) * PLAN_BYTES_PER_WRAPPER
    return -(-needed // WORKSPACE_STEP_BYTES) * WORKSPACE_STEP_BYTES + plans
