"""Batches and KV memory for tests of attention backends, drawn at random."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.runtime.attention import AttentionRule, KVLayer, NativeKVLayer, ReferenceAttention
from headway.runtime.attention.native import PairedKVLayer
from headway.runtime.batch import Batch


def make_batch(
    query_lens: list[int], contexts: list[int], block_size: int, rng: random.Random
) -> Batch:
    """Each sequence over blocks of its own in random order; block 0 is nobody's."""
    counts = [-(-context // block_size) for context in contexts]
    free = rng.sample(range(1, sum(counts) + 1), sum(counts))
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return with_tables(query_lens, contexts, block_size, tables)


def with_tables(
    query_lens: list[int], contexts: list[int], block_size: int, tables_SB: Tensor
) -> Batch:
    """A step of these sequences."""
    slots = []
    for row, (length, context) in enumerate(zip(query_lens, contexts, strict=True)):
        at = torch.arange(context - length, context)
        slots.append(tables_SB[row, at // block_size] * block_size + at % block_size)
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == 1:
        decodes += 1
    return Batch(
        token_ids_T=torch.cat(slots),
        positions_T=torch.cat(slots),
        slots_GT=[torch.cat(slots)],
        block_tables_GSB=[tables_SB],
        query_lens=query_lens,
        context_lens=contexts,
        num_decodes=decodes,
        sampled_rows=[],
        sampled_sequences=[],
    )


def with_sink_logits(rule: AttentionRule, heads: int, dtype: torch.dtype) -> AttentionRule:
    """The rule with a random sink logit for each query head; one of them takes nearly all."""
    logits = torch.randn(heads, generator=torch.Generator().manual_seed(heads)) * 3
    logits[-1] = 40.0
    return replace(rule, sink_logits=logits.to(dtype))


@dataclass(slots=True)
class Case:
    """q, k, v of a step, what it must give, and the memory before, as reference and native."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: Batch
    rule: AttentionRule
    layer: NativeKVLayer
    expected: Tensor


def fill(layer: NativeKVLayer, k_memory: Tensor, v_memory: Tensor) -> None:
    """Make (blocks, block_size, G, D) numbers the layer's own."""
    if isinstance(layer, PairedKVLayer) and layer.paired:
        k, v = layer.paired_views()
        k.copy_(k_memory.transpose(1, 2).unflatten(-1, (-1, 2)))
        v.copy_(v_memory.transpose(1, 2).unflatten(2, (-1, 2)))
    else:
        layer.k.copy_(k_memory.permute(0, 2, 3, 1))
        layer.v.copy_(v_memory.permute(0, 2, 1, 3))


def make_case(
    query_lens: list[int],
    contexts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    rule: AttentionRule,
    dtype: torch.dtype,
    seed: int,
    kind: type[NativeKVLayer] = NativeKVLayer,
) -> Case:
    """Whatever no row may see is NaN in native memory, and 0 in the reference's."""
    num_heads, kv_heads = heads
    batch = make_batch(query_lens, contexts, block_size, random.Random(seed))
    draw = torch.Generator().manual_seed(seed)
    shape = (int(batch.block_tables_GSB[0].max()) + 1, block_size, kv_heads, head_dim)
    k_memory, v_memory = torch.full((2, *shape), torch.nan, dtype=dtype)
    for row, (length, context) in enumerate(zip(query_lens, contexts, strict=True)):
        sinks = torch.arange(min(rule.sinks, rule.first_visible(context - length)))
        at = torch.cat([sinks, torch.arange(rule.first_visible(context - length), context)])
        places = batch.block_tables_GSB[0][row, at // block_size], at % block_size
        for memory in (k_memory, v_memory):
            drawn = torch.randn(len(at), kv_heads, head_dim, generator=draw)
            memory[places] = drawn.to(dtype)
    tokens = sum(query_lens)
    q, k, v = (
        torch.randn(tokens, count, head_dim, generator=draw).to(dtype)
        for count in (num_heads, kv_heads, kv_heads)
    )
    layer = kind.zeros(shape, 0, dtype, "cpu")
    fill(layer, k_memory, v_memory)
    k_memory, v_memory = k_memory.nan_to_num(), v_memory.nan_to_num()
    expected = ReferenceAttention().attend(q, k, v, KVLayer(k_memory, v_memory, 0), batch, rule)
    batch.views.clear()
    return Case(q, k, v, batch, rule, layer, expected)
