"""The contract of a backend: write this step's keys and values, then attend to what the rule shows.

`attend` computes, for each sequence s of the batch and each of its tokens at position p:

    K, V = the keys and values of positions f … p, from the blocks of s,
           f = 0 without a window, else max(0, p - window + 1), and of 0 … min(f, sinks) - 1
    z    = q · Kᵀ · scale                       with query head h reading KV head h // (N / G)
    z    = softcap · tanh(z / softcap)          where there is a soft cap
    out  = softmax(z) · V                       with a sink logit: softmax([z, sink of h]) · [V, 0]

MHA (G = N), GQA and MQA (G = 1) are the shapes of q and k; window and cap belong to the rule.

Where the layer has bounds of its keys, a token may read only some blocks (`Batch.reads_T`), chosen
per KV head: the first block, its own block, and those whose bounds promise the highest scores (Tang
et al. 2024, Quest). No key k of a block scores more than its bounds, summed over the query heads:

    Σ_n q_n · k  ≤  Σ_n Σ_d max(q_nd · least_d, q_nd · most_d)
                 =  Σ_d up_d · most_d - down_d · least_d

where up is Σ_n max(q_n, 0) and down Σ_n max(-q_n, 0).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The parameters of a layer: `window` counts tokens, 0 means all; `softcap` 0 means none.

    Behind a window the first `sinks` tokens of the sequence are visible, too. `sink_logits` has one
    number for each query head, in the type of the queries: learned weights, which take no slot of
    the KV memory.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: int = 0
    sink_logits: Tensor | None = None

    def first_visible(self, position: int) -> int:
        """Return the first position that the token at `position` sees: window 4, position 9 → 6."""
        return max(0, position - self.window + 1) if self.window else 0

    def visible_blocks(self, begin: int, end: int, block_size: int) -> list[int]:
        """Return the indices in the block table of all blocks that the tokens begin … end - 1 see.

        Blocks of 4, a window of 6, 2 sinks: token 12 sees 0, 1, 7 … 12, in the blocks 0, 1, 2, 3.
        """
        first = self.first_visible(begin) // block_size
        num_sink_blocks = min(first, -(-self.sinks // block_size)) if self.window else 0
        return [*range(num_sink_blocks), *range(first, -(-end // block_size))]

    def visibility_mask(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Return whether tokens at `query_at` see those at `key_at`; both broadcast."""
        visible = key_at <= query_at
        if self.window:
            visible = visible & ((key_at > query_at - self.window) | (key_at < self.sinks))
        return visible


def positions_of(blocks: list[int], block_size: int, device: torch.device) -> Tensor:
    """Return the positions of the slots of these blocks of a block table, in their order."""
    blocks_B = torch.tensor(blocks, dtype=torch.int64, device=device)
    within = torch.arange(block_size, device=device)
    return (blocks_B[:, None] * block_size + within).flatten()


class AttentionBackend(Protocol):
    """T tokens, N query heads, G KV heads, D head size. `kv_layer` is its memory's class."""

    name: str
    kv_layer: type[KVLayer]

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        """Write K and V of this step to `layer` and return the attention's output, (T, N, D).

        K and V are None where another layer, whose memory this layer shares, has written them. D of
        the output is that of the values; latent rows have longer keys.
        """
        ...
