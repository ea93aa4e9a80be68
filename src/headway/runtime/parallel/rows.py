"""Rows of a step split over the ranks that hold its contexts: a rank computes the tokens it holds.

A token belongs to the rank that holds its position. That rank computes all layers of the token,
except attention over what other ranks hold, so prompts are cut into runs of 512 tokens. Example
with 2 ranks, a chunk of the tokens 400 … 655 of one sequence and token 9 of another:

    rank 0    400 … 511 of the first, 9 of the second      rank 1    512 … 655 of the first

A rank without tokens computes one placeholder row, which is written to the null block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.runtime.batch import Batch
from headway.runtime.parallel.group import RankGroup
from headway.spec.context_shards import SPLIT_TOKENS

ROW_PARTITION = -2
"""Key of the `RowPartition` in `Batch.views` of a rank's batch."""


@dataclass(frozen=True, slots=True)
class RowPartition:
    """A step's rows, `counts` of them on each rank of `group`.

    `own_T` are the indices of this rank's rows in the step; `at_T` is the index of each row of the
    step among the rows of all ranks, rank 0's first.
    """

    whole: Batch
    own: Batch
    group: RankGroup
    counts: Sequence[int]
    own_T: Tensor
    at_T: Tensor

    def gather(self, own_TH: Tensor) -> Tensor:
        """Return all ranks' rows in the step's order, (T, H). Raises RankLostError."""
        count = self.counts[self.group.rank]
        return self.group.concat_rows(own_TH[:count], self.counts)[self.at_T]

    def scatter_own(self, own_TH: Tensor) -> Tensor:
        """Return own rows in the step's order, (T, H), zeros for those of other ranks."""
        count, x_TH = (
            self.counts[self.group.rank],
            own_TH.new_zeros(len(self.at_T), own_TH.shape[1]),
        )
        x_TH[self.own_T[:count]] = own_TH[:count]
        return x_TH

    def select_own(self, x_TND: Tensor) -> Tensor:
        """Return this rank's rows of the step's rows, or its placeholder row."""
        return x_TND[self.own_T]


def partition_rows(batch: Batch, group: RankGroup) -> RowPartition:
    """Return the partition of `batch` with this rank's batch."""
    owner_T = batch.positions_T // SPLIT_TOKENS % group.size
    of_ranks = [(owner_T == rank).nonzero().flatten() for rank in range(group.size)]
    own_T, counts = of_ranks[group.rank], [len(rows) for rows in of_ranks]
    null_row = torch.zeros(1, dtype=torch.int64)
    slots = [slots_T[own_T] if len(own_T) else null_row for slots_T in batch.slots_GT]
    own_T = own_T if len(own_T) else null_row
    own = replace(
        batch,
        token_ids_T=batch.token_ids_T[own_T],
        positions_T=batch.positions_T[own_T],
        rope_rows_T=None if batch.rope_rows_T is None else batch.rope_rows_T[own_T],
        slots_GT=slots,
        query_lens=[len(own_T)],
        context_lens=[len(own_T)],
        views={},
    )
    at_T = torch.cat(of_ranks).argsort()
    partition = own.views[ROW_PARTITION] = RowPartition(batch, own, group, counts, own_T, at_T)
    return partition
