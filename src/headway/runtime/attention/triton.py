"""Paged attention by our own Triton kernel: any head size, caps, windows, sinks, int8 KV, latent.

One call for a mixed batch, from lengths and tables that are on the device already.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch
from headway.runtime.rounding import round_rows


@dataclass(slots=True)
class ScaledKVLayer(KVLayer):
    """K and V as they are, or as int8 levels with a scale for each token and head.

    Scales are fp32, (blocks, block_size, G); without int8 they are empty.
    """

    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], group: int, dtype: torch.dtype, device: str
    ) -> Self:
        k, v = torch.zeros(2, *shape, dtype=dtype, device=device)
        scales = shape[:3] if dtype == torch.int8 else (0,)
        k_scale, v_scale = torch.zeros(2, *scales, device=device)
        return cls(k, v, group, k_scale, v_scale)

    @property
    def parts(self) -> list[Tensor]:
        scales = [self.k_scale, self.v_scale] if self.k_scale.numel() else []
        return [self.k, self.v, *scales]

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Those of K and V, where they have some."""
        return (self.k_scale, self.v_scale) if self.k_scale.numel() else None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
        if self.scales is None:
            self.k.view(-1, *self.k.shape[2:]).index_copy_(0, slots_T, k_TGD)
            self.v.view(-1, *self.v.shape[2:]).index_copy_(0, slots_T, v_TGD)
            return
        for memory, scales, x_TGD in (
            (self.k, self.k_scale, k_TGD),
            (self.v, self.v_scale, v_TGD),
        ):
            levels, of_rows = round_rows(x_TGD.flatten(0, 1))
            memory.view(-1, *memory.shape[2:]).index_copy_(0, slots_T, levels.view(x_TGD.shape))
            scales.view(-1, scales.shape[2]).index_copy_(0, slots_T, of_rows.view(x_TGD.shape[:2]))

    def wipe(self, slots_T: Tensor) -> None:
        for part in self.parts:
            part.view(-1, *part.shape[2:])[slots_T] = 0

    def gather(self, blocks_B: Tensor) -> tuple[Tensor, Tensor]:
        """In fp32 where the memory is int8; for comparisons, the kernel reads it in place."""
        shape = (*blocks_B.shape[:-1], -1, *self.k.shape[2:])
        flat = blocks_B.flatten()
        k, v = self.k.index_select(0, flat), self.v.index_select(0, flat)
        if self.scales is not None:
            k = k * self.k_scale.index_select(0, flat)[..., None]
            v = v * self.v_scale.index_select(0, flat)[..., None]
        return k.view(shape), v.view(shape)


class TritonAttention:
    """The kernel, and the memory it reads."""

    name = "triton"
    kv_layer: type[KVLayer] = ScaledKVLayer

    def __init__(self) -> None:
        from headway.runtime.cuda.triton.fused import rope_write
        from headway.runtime.cuda.triton.paged_attention import paged_attention

        self._attend, self._rope_write = paged_attention, rope_write

    def rope_write(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        angles: tuple[Tensor, Tensor],
        layer: KVLayer,
        batch: Batch,
    ) -> Tensor | None:
        """The queries rotated, with rotated keys and the values written, in one pass.

        None, and nothing done, where the memory rounds them.
        """
        assert isinstance(layer, ScaledKVLayer)
        if layer.scales is not None:
            return None
        memory, slots_T = (layer.k, layer.v), batch.slots_GT[layer.group]
        return self._rope_write(q_TND, k_TGD, v_TGD, angles, memory, slots_T)

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        assert batch.lens is not None
        scales = layer.scales if isinstance(layer, ScaledKVLayer) else None
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        lens = batch.lens
        return self._attend(
            q_TND,
            layer.k,
            layer.v,
            scales,
            lens.query_starts_S1,
            lens.context_lens_S,
            lens.tables_GSB[layer.group],
            lens.longest_query,
            lens.longest_context,
            scale=rule.scale,
            softcap=rule.softcap,
            window=rule.window,
            sinks=rule.sinks,
            sink_logits=rule.sink_logits,
        )
