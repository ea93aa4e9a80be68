"""Native attention over a context that is dealt over ranks: each has the sums of its own splits.

Ranks hand their queries around, each finds the sums of the splits that it holds for all of them,
(weighted values, highest score, sum of weights), these go around, too, and each merges all of them
in the order of the splits, so its rows have the bits that one rank gives them. With contexts of
1,300 and 40 tokens, a row each, 2 ranks: rank 0 has two rows of sums of the first and one of the
second, rank 1 has one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.native import NativeAttention, NativeKVLayer, lens_of
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch
from headway.runtime.native.library import TYPES, address
from headway.runtime.native.lower import recordable
from headway.runtime.parallel.rows import DEALT, DealtRows
from headway.spec.dealt import SPLIT_TOKENS

COUNTS = -1
"""Where `Batch.views` has how many rows of sums each rank has."""


class DealtAttention(NativeAttention):
    """`NativeAttention` of a rank, over batches that are `DealtRows.own`."""

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

        def over_ranks(q_TND: Tensor, batch: Batch) -> Tensor:
            return self._over_ranks(q_TND, layer, batch, rule)

        return self._attend(q_TND, k_TGD, v_TGD, layer, batch, over_ranks)

    @recordable("attend_over_ranks")
    def _attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: NativeKVLayer,
        batch: Batch,
        over_ranks: Callable[[Tensor, Batch], Tensor],
    ) -> Tensor:
        """A row for nobody is written to the null block, which nobody reads."""
        self.write(k_TGD, v_TGD, layer, batch.slots_GT[layer.group])
        return over_ranks(q_TND, batch)

    def _over_ranks(
        self, own_TND: Tensor, layer: NativeKVLayer, own: Batch, rule: AttentionRule
    ) -> Tensor:
        dealt: DealtRows = own.views[DEALT]
        batch, group = dealt.whole, dealt.group
        if COUNTS not in own.views:
            counts = count_rows(batch.query_lens, batch.context_lens, group.size)
            own.views[COUNTS] = counts
        counts = own.views[COUNTS]
        q_TND = dealt.together(own_TND.flatten(1)).unflatten(1, own_TND.shape[1:])
        out_TND, lanes = self._room_for(q_TND), self._library.lanes
        record = -(-q_TND.shape[2] // lanes) * lanes + lanes
        own_sums = torch.empty(counts[group.rank], q_TND.shape[1] * record)
        tables_SB = batch.block_tables_GSB[layer.group]
        lens = lens_of(batch, layer.group)

        def call(sums: Tensor | None, everybodys: Tensor | None) -> None:
            self._library.calls.attention_dealt(
                *(address(q_TND), address(out_TND), q_TND.stride(0)),
                *(address(tables_SB), *(address(one) for one in lens)),
                *(*tables_SB.shape, q_TND.shape[1], rule.scale, rule.softcap),
                *(address(rule.sink_logits), TYPES[q_TND.dtype], group.rank, group.size),
                *(address(sums), address(everybodys), *layer.numbers),
            )

        call(own_sums, None)
        call(None, group.rows(own_sums, counts))
        return dealt.of_own(out_TND)


def count_rows(query_lens: list[int], context_lens: list[int], ranks: int) -> list[int]:
    """By rank how many rows of sums it has: of each token one for each split of its sequence.

    >>> count_rows([1, 2], [1300, 40], 2)
    [4, 1]
    """
    found = [0] * ranks
    for length, context in zip(query_lens, context_lens, strict=True):
        splits = -(-context // SPLIT_TOKENS)
        for rank in range(ranks):
            found[rank] += length * ((splits - rank + ranks - 1) // ranks)
    return found
