"""Paged attention by our own Triton kernel: any head size, caps, windows, sinks, int8 KV, latent.

Lengths and tables are already on the device. Decodes have another tile and other splits than
chunks, so a mixed batch takes two calls, and a decode has the same bits in every batch.
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
    """K and V unrounded, or as int8 levels with a scale for each token and head.

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
        return [self.k, self.v, *(self.scales or ())]

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of K and V, None without int8."""
        return (self.k_scale, self.v_scale) if self.k_scale.numel() else None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
        if self.scales is None:
            super(ScaledKVLayer, self).write(k_TGD, v_TGD, slots_T)
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
        """Return K and V for comparisons, in fp32 where they are int8."""
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
        """Rotate queries and keys and write keys and values to memory, in one pass; return the
        queries.

        Returns None, and does nothing, where the memory is int8.
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
        if layer.group not in batch.views:
            batch.views[layer.group] = spans_of(batch, layer.group)
        out = torch.empty(
            *q_TND.shape[:2], layer.v.shape[-1], dtype=q_TND.dtype, device=q_TND.device
        )
        for tokens, lengths in batch.views[layer.group]:
            self._attend(
                q_TND[tokens],
                layer.k,
                layer.v,
                scales,
                *lengths,
                scale=rule.scale,
                softcap=rule.softcap,
                window=rule.window,
                sinks=rule.sinks,
                sink_logits=rule.sink_logits,
                out=out[tokens],
            )
        return out


def spans_of(
    batch: Batch, group: int
) -> list[tuple[slice, tuple[Tensor, Tensor, Tensor, int, int]]]:
    """Return (tokens, (query starts, contexts, table, longest query, longest context)) of each
    call.

    The decodes, which come first, and the rest are separate calls; a batch without both is one.
    Decodes of 41 and 3 tokens and a chunk of 5 behind 28: tokens 0 … 1 with starts 0, 1, 2 and
    contexts up to 41, then tokens 2 … 6 with starts 0, 5 and a context of 33.
    """
    lens, decodes = batch.lens, batch.num_decodes
    assert lens is not None
    starts_S1, contexts_S, table_SB = (
        lens.query_starts_S1,
        lens.context_lens_S,
        lens.tables_GSB[group],
    )
    if not 0 < decodes < len(batch.query_lens):
        longest = lens.longest_query, lens.longest_context
        return [(slice(None), (starts_S1, contexts_S, table_SB, *longest))]
    first = starts_S1[: decodes + 1], contexts_S[:decodes], table_SB[:decodes]
    rest = starts_S1[decodes:] - decodes, contexts_S[decodes:], table_SB[decodes:]
    return [
        (slice(0, decodes), (*first, 1, max(batch.context_lens[:decodes]))),
        (slice(decodes, None), (*rest, lens.longest_query, max(batch.context_lens[decodes:]))),
    ]
