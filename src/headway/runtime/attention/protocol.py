"""What a backend does: write this step's keys and values, then attend to all of the context.

`attend` is, for each sequence s of the batch and each of its tokens at position p:

    K, V = the keys and values of positions 0 … p, from the blocks of s
    out  = softmax(q · Kᵀ · scale) · V          with query head h reading KV head h // (N / G)
"""

from typing import Protocol

from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch


class AttentionBackend(Protocol):
    """T tokens, N query heads, G KV heads, D head size."""

    def attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, layer: KVLayer, batch: Batch
    ) -> Tensor:
        """The attention's output, (T, N, D), with this step's K and V written to `layer`."""
        ...
