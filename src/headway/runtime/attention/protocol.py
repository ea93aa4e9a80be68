"""What a backend does: write this step's keys and values, then attend to what the rule shows.

`attend` is, for each sequence s of the batch and each of its tokens at position p:

    K, V = the keys and values of positions f … p, from the blocks of s,
           f = 0 without a window, else max(0, p - window + 1), and of 0 … min(f, sinks) - 1
    z    = q · Kᵀ · scale                       with query head h reading KV head h // (N / G)
    z    = softcap · tanh(z / softcap)          where there is a soft cap
    out  = softmax(z) · V                       with a sink logit: softmax([z, sink of h]) · [V, 0]

MHA (G = N), GQA and MQA (G = 1) are the shapes of q and k; the window and the cap are the rule's.

Where the layer keeps bounds of its keys, a token may read some blocks alone (`Batch.reads_T`), for
each KV head others: the first, its own and those between of which its query heads expect most (Tang
et al. 2024, Quest). No key k of a block scores more than its bounds do, in the sum over the heads:

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
    """A layer's own numbers: `window` counts tokens, 0 is all; `softcap` 0 is none.

    Behind a window the first `sinks` tokens of the sequence are seen, too. `sink_logits` are
    one for each query head, in the type of the queries. They are learned weights, no tokens:
    nothing of them lies in the cache.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: int = 0
    sink_logits: Tensor | None = None

    def first_visible(self, position: int) -> int:
        """The first position the token at `position` sees: window 4, position 9 → 6."""
        return max(0, position - self.window + 1) if self.window else 0

    def visible_blocks(self, begin: int, end: int, block_size: int) -> list[int]:
        """Places in the block table of all that the tokens begin … end - 1 see.

        Blocks of 4, a window of 6, 2 sinks: token 12 sees 0, 1, 7 … 12, in the blocks 0, 1, 2, 3.
        """
        first = self.first_visible(begin) // block_size
        num_sink_blocks = min(first, -(-self.sinks // block_size)) if self.window else 0
        return [*range(num_sink_blocks), *range(first, -(-end // block_size))]

    def visibility_mask(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Whether the token at each position of the first sees that of the second; broadcasts."""
        visible = key_at <= query_at
        if self.window:
            visible = visible & ((key_at > query_at - self.window) | (key_at < self.sinks))
        return visible


def positions_of(blocks: list[int], block_size: int, device: torch.device) -> Tensor:
    """The positions of the slots of these places in a block table, in their order."""
    blocks_B = torch.tensor(blocks, dtype=torch.int64, device=device)
    within = torch.arange(block_size, device=device)
    return (blocks_B[:, None] * block_size + within).flatten()


class AttentionBackend(Protocol):
    """T tokens, N query heads, G KV heads, D head size. `kv_layer` is the memory it reads."""

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
        """The attention's output, (T, N, D), with this step's K and V written to `layer`.

        None: they are written already, by the layer whose K and V these are.

        D of the output is the values', which latent rows have fewer of than their keys.
        """
        ...
