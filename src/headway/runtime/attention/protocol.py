"""What a backend does: write this step's keys and values, then attend to what the rule shows.

`attend` is, for each sequence s of the batch and each of its tokens at position p:

    K, V = the keys and values of positions f … p, from the blocks of s,
           f = 0 without a window, else max(0, p - window + 1)
    z    = q · Kᵀ · scale                       with query head h reading KV head h // (N / G)
    z    = softcap · tanh(z / softcap)          where there is a soft cap
    out  = softmax(z) · V                       with a sink logit: softmax([z, sink of h]) · [V, 0]

MHA (G = N), GQA and MQA (G = 1) are the shapes of q and k; the window and the cap are the rule's.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """A layer's own numbers: `window` counts tokens, 0 is all; `softcap` 0 is none.

    `sink_logits` are one for each query head, in the type of the queries. They are learned weights,
    no tokens: nothing of them lies in the cache.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sink_logits: Tensor | None = None

    def first_seen(self, position: int) -> int:
        """The first position the token at `position` sees: window 4, position 9 → 6."""
        return max(0, position - self.window + 1) if self.window else 0


class AttentionBackend(Protocol):
    """T tokens, N query heads, G KV heads, D head size. `kv_layer` is the memory it reads."""

    name: str
    kv_layer: type[KVLayer]

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        """The attention's output, (T, N, D), with this step's K and V written to `layer`."""
        ...
