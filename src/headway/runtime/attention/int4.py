"""KV memory of 4 bits: K by channel over a block, V by token in groups of 32 channels.

Either of them may be int8 by token instead, as in memory that is int8 only (`runtime.native`).

A block is rounded when its last token arrives; until then its keys and values lie unrounded in an
open block. So the positions alone decide how a key is read: token i reads token j unrounded while
both are in the same block, rounded otherwise. Example with blocks of 64, token 130:

    0 … 63 rounded    64 … 127 rounded    128, 129, 130 unrounded

    number ≈ offset + scale · level, levels 0 … 15, offset and scale in fp16
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch
from headway.runtime.native.library import INT4, INT4_INT8, INT8_INT4, address
from headway.spec import KVGroupSpec
from headway.spec.kv_format import NUMBERS, KVFormat

GROUP = NUMBERS["int4-token"].group
MAX_LEVEL = 15
NATIVE_KINDS = {(False, False): INT4, (True, False): INT8_INT4, (False, True): INT4_INT8}
"""(K is int8, V is int8) → code of the native library."""


@dataclass(slots=True)
class Int4KVLayer(KVLayer):
    """Levels and scales of one layer, and the open blocks, which are a KV group of their own.

    Levels have the order in which native code reads vectors (`RoundKV` in native/table.h), two per
    byte: K (blocks, G, D / 2, block_size), V (blocks, G, D / 32, 8, 128). `k_scale` (blocks, G, 2,
    D) and `v_scale` (blocks, G, D / 32, 2, block_size) hold scales, then offsets, in fp16.

    In int8 K is (blocks, G, D, block_size), V is (blocks, G, block_size, D), and `k_scale` or
    `v_scale` is (blocks, G, block_size) in fp32.
    """

    k_scale: Tensor
    v_scale: Tensor
    open: KVLayer
    numbers: tuple[int, ...] = field(init=False)
    """Arguments that describe the layer in native calls."""

    def __post_init__(self) -> None:
        _, kv_heads, rows, block_size = self.k.shape
        kinds = self.k.dtype == torch.int8, self.v.dtype == torch.int8
        shape = (kv_heads, rows if kinds[0] else 2 * rows, block_size)
        self.numbers = (*map(address, self.parts), 0, *shape, NATIVE_KINDS[kinds], 0)

    @property
    def block_size(self) -> int:
        return int(self.k.shape[-1])

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of the rounded blocks; open blocks have other block ids."""
        return [self.k, self.v, self.k_scale, self.v_scale]

    def wipe(self, slots_T: Tensor) -> None:
        """Set whole blocks to zeros: a channel's scale depends on all of their tokens."""
        for part in self.parts:
            part[slots_T // self.block_size] = 0

    def gather(self, blocks_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of consecutive full blocks in fp32, (…, B · block_size, G, D)."""
        k_scale, v_scale = (part[blocks_B].float().unsqueeze(-1) for part in self.scales)
        if self.k.dtype == torch.int8:
            k = self.k[blocks_B] * k_scale.transpose(-1, -2)  # (…, B, G, D, block_size)
        else:
            scale, offset = k_scale.unbind(-3)
            k = offset + scale * unpack_k(self.k[blocks_B])
        if self.v.dtype == torch.int8:
            v = self.v[blocks_B] * v_scale  # (…, B, G, block_size, D)
        else:
            scale, offset = v_scale.unbind(-3)
            v = offset + scale * unpack_v(self.v[blocks_B])  # (…, B, G, D / 32, block_size, 32)
            v = v.transpose(-2, -3).flatten(-2)
        return k.movedim(-1, -3).flatten(-4, -3), v.movedim(-2, -3).flatten(-4, -3)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Scales of K and V, with their offsets."""
        return self.k_scale, self.v_scale

    def round(self, pairs_P2: Tensor) -> None:
        """Round the open blocks into blocks: pairs (open block, block), (P, 2)."""
        if not len(pairs_P2):
            return
        exact, rounded = pairs_P2.unbind(1)
        shape = (len(pairs_P2), self.block_size, *self.v.shape[1:2], -1)
        k, v = (x.float().view(shape).transpose(1, 2) for x in self.open.gather(exact))
        if self.k.dtype == torch.int8:
            levels, self.k_scale[rounded] = round_bytes(k)
            self.k[rounded] = levels.transpose(-1, -2)
        else:
            levels, self.k_scale[rounded] = round_numbers(k.transpose(-1, -2))
            self.k[rounded] = pack_k(levels)
        if self.v.dtype == torch.int8:
            self.v[rounded], self.v_scale[rounded] = round_bytes(v)
        else:
            levels, self.v_scale[rounded] = round_numbers(
                v.unflatten(-1, (-1, GROUP)).transpose(2, 3)
            )
            self.v[rounded] = pack_v(levels)


def round_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (levels (…, M, N), scales and offsets (…, 2, M)) of M groups of N numbers."""
    low, high = x.amin(-1), x.amax(-1)
    finite = x.isfinite().all(-1)
    scale = ((high - low) / MAX_LEVEL).where(finite, torch.nan).half()
    offset = low.where(finite, torch.nan).half()
    step, base = scale.float()[..., None], offset.float()[..., None]
    levels = ((x - base) / step).round().nan_to_num(0.0).clamp(0, MAX_LEVEL)
    return levels.where(step > 0, 0).to(torch.uint8), torch.stack([scale, offset], -2)


def round_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 (…, N), scales (…)) of groups of N numbers, as `quantize_row` of native/kv.inl
    does.

    A number halfway between two levels may become either in native code, which fuses multiplication
    and addition.
    """
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    most = torch.full_like(largest, 127)  # dividing a plain 127, torch multiplies by an inverse
    inverse = torch.where(finite & (largest > 1e-30), most / largest, 0)
    levels = torch.where(finite[..., None], x, 0) * inverse[..., None]
    scale = torch.where(largest > 1e-30, largest / 127, 0).where(finite, torch.nan)
    return levels.round().to(torch.int8), scale


def pack_nibbles(levels: Tensor) -> Tensor:
    """Return words of 8 levels, (…, 8), as bytes, (…, 4); the first level is in the lowest bits."""
    return levels[..., ::2] | levels[..., 1::2] << 4


def unpack_nibbles(words: Tensor) -> Tensor:
    """Return the levels (…, 8) of words (…, 4), in fp32."""
    return torch.stack([words & 15, words >> 4], -1).flatten(-2).float()


def pack_k(levels: Tensor) -> Tensor:
    """Pack levels (…, D, 64) into words of two channels, four tokens: (…, D / 2, 64)."""
    words = levels.unflatten(-1, (4, 16)).unflatten(-3, (-1, 2)).movedim(-1, -3)
    return pack_nibbles(words.flatten(-2)).flatten(-2)


def unpack_k(packed: Tensor) -> Tensor:
    """Return the levels that `pack_k` packed, in fp32."""
    levels = unpack_nibbles(packed.unflatten(-1, (16, 4))).unflatten(-1, (2, 4))
    return levels.movedim(-3, -1).flatten(-2).flatten(-3, -2)


def pack_v(levels: Tensor) -> Tensor:
    """Pack V's levels (…, 64, 32) into words of eight tokens, the even ones first: (…, 8, 128)."""
    words = levels.unflatten(-2, (8, 4, 2)).movedim(-1, -3).transpose(-1, -2)
    return pack_nibbles(words.flatten(-2)).flatten(-2)


def unpack_v(packed: Tensor) -> Tensor:
    """Return the levels that `pack_v` packed, in fp32."""
    levels = unpack_nibbles(packed.unflatten(-1, (GROUP, 4))).unflatten(-1, (2, 4))
    return levels.transpose(-1, -2).movedim(-3, -1).flatten(-4, -2)


def filled_blocks(batch: Batch, layer: Int4KVLayer) -> Tensor:
    """Return the pairs (open block, block) that this step fills, (P, 2), cached by group."""
    key = -1 - layer.group
    if key not in batch.views:
        size = layer.block_size
        tables, open_tables = (
            batch.block_tables_GSB[group] for group in (layer.group, layer.open.group)
        )
        places = [
            (row, block)
            for row, (length, end) in enumerate(
                zip(batch.query_lens, batch.context_lens, strict=True)
            )
            for block in range((end - length) // size, end // size)
        ]
        rows, blocks = (torch.tensor([one[i] for one in places], dtype=torch.long) for i in (0, 1))
        batch.views[key] = torch.stack([open_tables[rows, blocks], tables[rows, blocks]], 1)
    pairs_P2: Tensor = batch.views[key]
    return pairs_P2


def allocate_int4(
    groups: tuple[KVGroupSpec, ...],
    num_blocks: tuple[int, ...],
    format: KVFormat,
    dtype: torch.dtype,
    kind: type[KVLayer],
) -> list[KVLayer]:
    """Allocate the memory of all layers; the last of `num_blocks` counts the open blocks."""
    layers: dict[int, KVLayer] = {}
    block_size = format.block_size
    for index, (group, count) in enumerate(zip(groups, num_blocks[:-1], strict=True)):
        heads, dim = group.num_kv_heads, group.head_dim
        for layer in group.layers:
            if group.kv_dtype:
                shape = (count, block_size, heads, dim)
                layers[layer] = kind.zeros(shape, index, dtype, "cpu")
                continue
            k, k_scale = allocate_keys(format, count, heads, dim)
            v, v_scale = allocate_values(format, count, heads, dim)
            shape = (num_blocks[-1], block_size, heads, dim)
            open_layer = kind.zeros(shape, len(groups), dtype, "cpu")
            layers[layer] = Int4KVLayer(k, v, index, k_scale, v_scale, open_layer)
    return [layers[layer] for layer in sorted(layers)]


def allocate_keys(format: KVFormat, count: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return zeros for K and its scales, for `count` blocks."""
    size = format.block_size
    if format.k.bits == 8:
        k = torch.zeros(count, heads, dim, size, dtype=torch.int8)
        return k, torch.zeros(count, heads, size)
    k = torch.zeros(count, heads, dim // 2, size, dtype=torch.uint8)
    return k, torch.zeros(count, heads, 2, dim, dtype=torch.half)


def allocate_values(format: KVFormat, count: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return zeros for V and its scales, for `count` blocks."""
    size, groups = format.block_size, dim // GROUP
    if format.v.bits == 8:
        v = torch.zeros(count, heads, size, dim, dtype=torch.int8)
        return v, torch.zeros(count, heads, size)
    v = torch.zeros(count, heads, groups, size // 8, 4 * GROUP, dtype=torch.uint8)
    return v, torch.zeros(count, heads, groups, 2, size, dtype=torch.half)


def with_open_layers(layers: list[KVLayer]) -> list[KVLayer]:
    """Return the layers and those of their open blocks: all that is copied and swapped."""
    return layers + [layer.open for layer in layers if isinstance(layer, Int4KVLayer)]
