"""Native attention over contexts that are split over ranks (decode context parallelism).

Ranks exchange their queries. Each rank computes, for all queries, the partial sums of the splits
that it holds (weighted values, maximum score, sum of weights). These are exchanged as well, and
each rank merges them in the order of the splits, so its rows have the same bits as on one rank.
Example with 2 ranks and contexts of 1,300 and 40 tokens, one row each: rank 0 holds two partial
sums of the first context and one of the second, rank 1 holds one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.native import NativeAttention, NativeKVLayer, length_tensors
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch
from headway.runtime.native.library import TYPES, address
from headway.runtime.native.lower import recordable
from headway.runtime.parallel.rows import ROW_PARTITION, RowPartition
from headway.spec.context_shards import SPLIT_TOKENS

SUM_ROW_COUNTS = -1
"""Key in `Batch.views` of the number of partial sums on each rank."""


class ContextParallelAttention(NativeAttention):
    """`NativeAttention` of one rank, over batches that are `RowPartition.own`."""

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        assert k_TGD is not None and v_TGD is not None and isinstance(layer, NativeKVLayer)

        def attend_over_ranks(q_TND: Tensor, batch: Batch) -> Tensor:
            return self._attend_over_ranks(q_TND, layer, batch, rule)

        return self._attend(q_TND, k_TGD, v_TGD, layer, batch, attend_over_ranks)

    @recordable("attend_over_ranks")
    def _attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: NativeKVLayer,
        batch: Batch,
        attend_over_ranks: Callable[[Tensor, Batch], Tensor],
    ) -> Tensor:
        """Write K and V, then attend; a placeholder row goes to the null block."""
        self.write(k_TGD, v_TGD, layer, batch.slots_GT[layer.group])
        return attend_over_ranks(q_TND, batch)

    def _attend_over_ranks(
        self, own_TND: Tensor, layer: NativeKVLayer, own: Batch, rule: AttentionRule
    ) -> Tensor:
        partition: RowPartition = own.views[ROW_PARTITION]
        batch, group = partition.whole, partition.group
        if SUM_ROW_COUNTS not in own.views:
            counts = count_sum_rows(batch.query_lens, batch.context_lens, group.size)
            own.views[SUM_ROW_COUNTS] = counts
        counts = own.views[SUM_ROW_COUNTS]
        q_TND = partition.gather(own_TND.flatten(1)).unflatten(1, own_TND.shape[1:])
        out_TND, lanes = self._output_for(q_TND), self._library.lanes
        record = -(-q_TND.shape[2] // lanes) * lanes + lanes
        own_sums = torch.empty(counts[group.rank], q_TND.shape[1] * record)
        tables_SB = batch.block_tables_GSB[layer.group]
        lens = length_tensors(batch, layer.group)

        def call(sums: Tensor | None, all_sums: Tensor | None) -> None:
            self._library.calls.attention_dealt(
                *(address(q_TND), address(out_TND), q_TND.stride(0)),
                *(address(tables_SB), *(address(one) for one in lens)),
                *(*tables_SB.shape, q_TND.shape[1], rule.scale, rule.softcap),
                *(address(rule.sink_logits), TYPES[q_TND.dtype], group.rank, group.size),
                *(address(sums), address(all_sums), *layer.numbers),
            )

        call(own_sums, None)
        call(None, group.concat_rows(own_sums, counts))
        return partition.select_own(out_TND)


def count_sum_rows(query_lens: list[int], context_lens: list[int], ranks: int) -> list[int]:
    """Return how many partial sums each rank holds: one for each token and each split of its
    sequence.

    >>> count_sum_rows([1, 2], [1300, 40], 2)
    [4, 1]
    """
    counts = [0] * ranks
    for length, context in zip(query_lens, context_lens, strict=True):
        splits = -(-context // SPLIT_TOKENS)
        for rank in range(ranks):
            counts[rank] += length * ((splits - rank + ranks - 1) // ranks)
    return counts
