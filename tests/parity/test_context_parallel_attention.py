"""Native attention whose splits lie on several ranks gives the bits of one rank."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.runtime.attention import AttentionRule, NativeAttention, NativeKVLayer
from headway.runtime.attention.context_parallel import ContextParallelAttention, count_sum_rows
from headway.runtime.batch import Batch
from headway.runtime.parallel.group import SingleRank
from headway.runtime.parallel.rows import ROW_PARTITION, RowPartition
from headway.spec.context_shards import ContextShards
from parity.native_sets import each_instruction_set
from parity.paged import make_case, with_sink_logits

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = st.one_of(
    st.tuples(st.just(1), st.integers(1, 2100)),
    st.tuples(st.integers(1, 200), st.sampled_from([0, 400, 511, 512, 1000])).map(
        lambda pair: (pair[0], sum(pair))
    ),
)
"""(query length, context length)."""


class RankStandIn(SingleRank):
    """A rank that has all rows; sums are collected until all ranks have computed theirs."""

    def __init__(
        self, rank: int, size: int, num_rows: int, sums: list[Tensor], merges: bool
    ) -> None:
        self.rank, self.size, self.all_own = rank, size, [num_rows] * size
        self._sums, self._merges = sums, merges

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        if counts is self.all_own:
            return own_RW
        assert len(own_RW) == counts[self.rank]
        if self._merges:
            return torch.cat(self._sums)
        self._sums.append(own_RW)
        return torch.zeros(sum(counts), own_RW.shape[1])


def over_ranks(
    backend: ContextParallelAttention,
    q_TND: Tensor,
    batch: Batch,
    layer: NativeKVLayer,
    rule: AttentionRule,
    ranks: int,
) -> list[Tensor]:
    """The outputs of the ranks; each computes all rows and sees only its own blocks."""
    sums: list[Tensor] = []
    found = []
    for merges in (False, True):
        for rank in range(ranks):
            tables_SB = batch.block_tables_GSB[0].clone()
            dealt = ContextShards(ranks, layer.block_size)
            for at in range(tables_SB.shape[1]):
                if dealt.owner(at) != rank:
                    tables_SB[:, at] = 0
            whole = replace(batch, block_tables_GSB=[tables_SB], views={})
            group, every = (
                RankStandIn(rank, ranks, len(q_TND), sums, merges),
                torch.arange(len(q_TND)),
            )
            own = replace(whole, views={})
            own.views[ROW_PARTITION] = RowPartition(whole, own, group, group.all_own, every, every)
            out_TND = backend._attend_over_ranks(q_TND, layer, own, rule)
            found += [out_TND.clone()] if merges else []
    return found


@each_instruction_set
@settings(max_examples=15, deadline=None)
@given(
    sequences=st.lists(ROWS, min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (7, 1), (24, 3)]),
    head_dim=st.sampled_from([20, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 16, 32, 64, 256]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    sink_logits=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    own_memory=st.booleans(),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_bits_are_those_of_one_rank(
    library, sequences, heads, head_dim, block_size, softcap, sink_logits, dtype, own_memory,
    ranks, seed,
):  # fmt: skip
    """Mixed batches; the blocks of other ranks are NaN and must not be read."""
    one = NativeAttention(library)
    rule = AttentionRule(scale=head_dim**-0.5, softcap=softcap)
    case = make_case(
        [length for length, _ in sequences],
        [context for _, context in sequences],
        heads,
        head_dim,
        block_size,
        with_sink_logits(rule, heads[0], dtype) if sink_logits else rule,
        dtype,
        seed,
        one.kv_layer if own_memory else NativeKVLayer,
    )
    expected = one.attend(case.q, case.k, case.v, case.layer, case.batch, case.rule)
    found = over_ranks(
        ContextParallelAttention(library), case.q, case.batch, case.layer, case.rule, ranks
    )
    assert len(found) == ranks
    for out_TND in found:
        assert torch.equal(out_TND, expected)


def test_partial_sums_are_counted():
    """1,300 and 40 tokens, a row and two: two splits of the first on rank 0, one on rank 1."""
    assert count_sum_rows([1, 2], [1300, 40], 2) == [4, 1]
    assert count_sum_rows([1], [512], 3) == [1, 0, 0]
