"""Paged attention in native code: one pass over K and V for all query heads of a KV head.

Chunks and decodes are one job. The result of a row has the same bits in every chunk, batch and
thread; see native/attention.inl.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer, empty_bounds
from headway.runtime.attention.int4 import Int4KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch
from headway.runtime.memory import zeros
from headway.runtime.native.library import TYPES, NativeLibrary, address
from headway.runtime.native.lower import recordable

KV_TYPES = {**TYPES, torch.int8: 3}
PADDING_NUMBERS = 64
"""Numbers behind the last V, because a vector load may begin in its last channels."""


@dataclass(slots=True)
class NativeKVLayer(KVLayer):
    """K (blocks, G, D, block_size), V (blocks, G, block_size, D); see native/kv.inl.

    int8 numbers have a scale for each token and head, (blocks, G, block_size); otherwise the scales
    are empty. Where `paired` is true the same tensors have the layout of `PairedKVLayer`.
    """

    k_scale: Tensor
    v_scale: Tensor
    paired: bool = False
    numbers: tuple[int, ...] = field(init=False)
    """Arguments that describe the layer in native calls."""

    def __post_init__(self) -> None:
        _, kv_heads, head_dim, block_size = self.k.shape
        parts = (self.k, self.v, self.k_scale, self.v_scale, self.bounds)
        addresses = [address(part) for part in parts]
        shape = (kv_heads, head_dim, block_size)
        self.numbers = (*addresses, *shape, KV_TYPES[self.k.dtype], int(self.paired))

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], group: int, dtype: torch.dtype, device: str
    ) -> Self:
        """Return a layer of zeros; the system provides its pages when tokens are first written."""
        blocks, block_size, kv_heads, head_dim = shape
        size = blocks * kv_heads * head_dim * block_size
        k, v = (
            torch.frombuffer(zeros((size + PADDING_NUMBERS) * dtype.itemsize), dtype=dtype)[:size]
            for _ in range(2)
        )
        scales = (blocks, kv_heads, block_size) if dtype == torch.int8 else (0,)
        k_scale, v_scale = torch.zeros(2, *scales)
        k = k.view(blocks, kv_heads, head_dim, block_size)
        return cls(k, v.view(blocks, kv_heads, block_size, head_dim), group, k_scale, v_scale)

    @property
    def block_size(self) -> int:
        return int(self.k.shape[3])

    @property
    def parts(self) -> list[Tensor]:
        return [self.k, self.v, *self.scales, *([] if self.bounds is None else [self.bounds])]

    @property
    def scales(self) -> list[Tensor]:
        """Scales of K and V, empty without int8."""
        return [self.k_scale, self.v_scale] if self.k_scale.numel() else []

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def token_views(self) -> list[Tensor]:
        """Views of its tensors as (blocks, G, block_size, …)."""
        return [self.k.movedim(-1, -2), self.v, *self.scales]

    def read(self, slots_GK: Tensor) -> list[Tensor]:
        blocks, offsets, heads_G1 = self.places(slots_GK)
        return [part[blocks, heads_G1, offsets] for part in self.token_views]

    def put(self, parts: list[Tensor], slots_K: Tensor) -> None:
        blocks, offsets, heads_G1 = self.places(slots_K)
        for part, given in zip(self.token_views, parts, strict=True):
            part[blocks, heads_G1, offsets] = given

    def allocate_bounds(self) -> None:
        blocks, kv_heads, head_dim, _ = self.k.shape
        self.bounds = empty_bounds(blocks, kv_heads, head_dim, "cpu")
        self.__post_init__()

    def wipe(self, slots_T: Tensor) -> None:
        blocks, offsets = slots_T // self.block_size, slots_T % self.block_size
        self.k[blocks, :, :, offsets] = 0
        for part in (self.v, *self.scales):
            part[blocks, :, offsets] = 0

    def gather(self, blocks_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V for comparisons, in fp32 where they are int8."""
        k = self.k[blocks_B].movedim(-1, -3)
        v = self.v[blocks_B].movedim(-2, -3)
        if self.scales:
            k = k * self.k_scale[blocks_B].movedim(-1, -2)[..., None]
            v = v * self.v_scale[blocks_B].movedim(-1, -2)[..., None]
        return k.flatten(-4, -3), v.flatten(-4, -3)


@dataclass(slots=True)
class PairedKVLayer(NativeKVLayer):
    """Memory in the layout of matrix tiles (AMX), where it is bf16 and its shape fits.

    K is (blocks, G, D / 2, block_size, 2), two channels of a token side by side; V is (blocks, G,
    block_size / 2, D, 2), two tokens of a channel.
    """

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], group: int, dtype: torch.dtype, device: str
    ) -> Self:
        """Return a layer of zeros of `shape` (blocks, block_size, G, D)."""
        layer = super(PairedKVLayer, cls).zeros(shape, group, dtype, device)
        fits = dtype == torch.bfloat16 and shape[1] % 16 == 0 and shape[3] % 32 == 0
        return replace(layer, paired=fits)

    def paired_views(self) -> tuple[Tensor, Tensor]:
        """Return K (blocks, G, block_size, D / 2, 2), V (blocks, G, block_size / 2, 2, D)."""
        blocks, kv_heads, head_dim, block_size = self.k.shape
        k = self.k.view(blocks, kv_heads, head_dim // 2, block_size, 2)
        v = self.v.view(blocks, kv_heads, block_size // 2, head_dim, 2)
        return k.transpose(2, 3), v.transpose(3, 4)

    def read(self, slots_GK: Tensor) -> list[Tensor]:
        if not self.paired:
            return super(PairedKVLayer, self).read(slots_GK)
        blocks, offsets, heads_G1 = self.places(slots_GK)
        k, v = self.paired_views()
        return [k[blocks, heads_G1, offsets], v[blocks, heads_G1, offsets // 2, offsets % 2]]

    def put(self, parts: list[Tensor], slots_K: Tensor) -> None:
        if not self.paired:
            super(PairedKVLayer, self).put(parts, slots_K)
            return
        blocks, offsets, heads_G1 = self.places(slots_K)
        k, v = self.paired_views()
        k[blocks, heads_G1, offsets], v[blocks, heads_G1, offsets // 2, offsets % 2] = parts

    def wipe(self, slots_T: Tensor) -> None:
        if not self.paired:
            super(PairedKVLayer, self).wipe(slots_T)
            return
        blocks, offsets = slots_T // self.block_size, slots_T % self.block_size
        k, v = self.paired_views()
        k[blocks, :, offsets] = 0
        v[blocks, :, offsets // 2, offsets % 2] = 0

    def gather(self, blocks_B: Tensor) -> tuple[Tensor, Tensor]:
        if not self.paired:
            return super(PairedKVLayer, self).gather(blocks_B)
        k, v = (part[blocks_B] for part in self.paired_views())
        k, v = k.flatten(-2), v.flatten(-3, -2)  # (…, B, G, block_size, D)
        return k.transpose(-2, -3).flatten(-4, -3), v.transpose(-2, -3).flatten(-4, -3)


class NativeAttention:
    """One native call writes, one attends. The output is valid until the next call."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        has_tiles = library.instruction_set == "amx"
        self.kv_layer: type[KVLayer] = PairedKVLayer if has_tiles else NativeKVLayer
        self._library = library
        self._out = torch.empty(0)

    @recordable("attend")
    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        if isinstance(layer, Int4KVLayer):
            return self._attend_rounded(q_TND, k_TGD, v_TGD, layer, batch, rule)
        assert isinstance(layer, NativeKVLayer)
        if k_TGD is not None and v_TGD is not None:
            self.write(k_TGD, v_TGD, layer, batch.slots_GT[layer.group])
        q = dense_rows(q_TND)
        out_TND = self._output_for(q)
        tables_SB = batch.block_tables_GSB[layer.group]
        self._library.calls.attention(
            *(address(q), address(out_TND), q.stride(0)),
            *(address(tables_SB), *(address(lens) for lens in length_tensors(batch, layer.group))),
            *(*tables_SB.shape, q.shape[1], rule.window, rule.sinks, rule.scale, rule.softcap),
            *(address(rule.sink_logits), address(batch.reads_T)),
            *(TYPES[q.dtype], *layer.numbers),
        )
        return out_TND

    def _output_for(self, q_TND: Tensor) -> Tensor:
        """Return the memory for the output of these queries."""
        if self._out.numel() < q_TND.numel() or self._out.dtype != q_TND.dtype:
            self._out = torch.empty(q_TND.numel(), dtype=q_TND.dtype)
        return self._out[: q_TND.numel()].view(q_TND.shape)

    def _attend_rounded(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: Int4KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        """Write K and V to the open blocks, round those that are full, then attend to both."""
        exact = layer.open
        assert isinstance(exact, NativeKVLayer)
        tables = [batch.block_tables_GSB[one.group] for one in (layer, exact)]
        lens = [address(lens) for lens in length_tensors(batch, layer.group)]
        at = (*map(address, tables), *lens, *tables[0].shape)
        if k_TGD is not None and v_TGD is not None:
            self.write(k_TGD, v_TGD, exact, batch.slots_GT[exact.group])
            self._library.calls.round_kv(*at, *exact.numbers, *layer.numbers)
        q = dense_rows(q_TND)
        out_TND = self._output_for(q)
        self._library.calls.attention_rounded(
            *(address(q), address(out_TND), q.stride(0), *at),
            *(q.shape[1], rule.window, rule.scale, rule.softcap),
            address(rule.sink_logits),
            *(TYPES[q.dtype], *exact.numbers, *layer.numbers),
        )
        return out_TND

    def write(self, k_TGD: Tensor, v_TGD: Tensor, layer: NativeKVLayer, slots_T: Tensor) -> None:
        """Write the keys and values of this step into their slots, in the memory's own type."""
        k, v = dense_rows(k_TGD), dense_rows(v_TGD)
        self._library.calls.write_kv(
            *(address(k), address(v), k.stride(0), v.stride(0)),
            *(address(slots_T), len(slots_T), TYPES[k.dtype], *layer.numbers),
        )


def length_tensors(batch: Batch, group: int) -> tuple[Tensor, Tensor]:
    """Return query and context lengths as tensors, cached by group."""
    if group not in batch.views:
        batch.views[group] = torch.tensor(batch.query_lens), torch.tensor(batch.contexts(group))
    lengths: tuple[Tensor, Tensor] = batch.views[group]
    return lengths


def dense_rows(x_TND: Tensor) -> Tensor:
    """Return `x_TND` with the numbers of each token side by side, as in a slice of a wider row."""
    side_by_side = x_TND.stride()[1:] == (x_TND.shape[2], 1)
    return x_TND if side_by_side else x_TND.contiguous()
