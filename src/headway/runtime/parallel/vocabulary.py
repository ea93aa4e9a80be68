"""Embedding and head, cut by vocabulary: each rank has the rows of its tokens (Megatron-LM).

A lookup is the sum over the ranks, of which all but one give zeros. The logits of all tokens are
concatenated in shared memory; rank 0 orders them (`frames.LogitsOrder`) and broadcasts the rows,
because only rank 0 samples. Example with 211 tokens on 2 ranks: rank 0 has 0 … 104, rank 1 has 105
… 210; for the ids 7 and 106 rank 0 looks up (row 7, zeros), rank 1 (zeros, row 1).
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.config.parallel import bounds
from headway.runtime.layers import Build, Linear


class VocabEmbedding(nn.Module):
    """The rank's rows of the embedding."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.group = build.group
        ends = bounds(build.spec.vocab_size, self.group.size)
        self.first, end = ends[self.group.rank], ends[self.group.rank + 1]
        self.weight = build.weight(end - self.first, build.spec.hidden_size)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        at_T = token_ids_T - self.first
        on_other_rank_T = (at_T < 0) | (at_T >= len(self.weight))
        x_TH = functional.embedding(at_T.masked_fill(on_other_rank_T, 0), self.weight)
        return self.group.sum([x_TH.masked_fill(on_other_rank_T[:, None], 0)])


class VocabHead(Linear):
    """The rank's rows of the head: rank 0's hidden states in, the logits of all tokens out."""

    def __init__(self, build: Build) -> None:
        ends = bounds(build.spec.vocab_size, build.group.size)
        self.sizes = [end - begin for begin, end in pairwise(ends)]
        super().__init__(build, build.spec.hidden_size, self.sizes[build.group.rank])
        self.group = build.group
        self._nothing = torch.empty(1, build.spec.hidden_size, dtype=torch.float32)

    def forward(self, x_RH: Tensor) -> Tensor:
        return self.group.concat_columns(super().forward(self.group.broadcast(x_RH)), self.sizes)

    def answer(self, count: int) -> None:
        """Compute the rank's part of `count` rows of logits, on a rank above 0."""
        self(self._nothing.expand(count, -1))
