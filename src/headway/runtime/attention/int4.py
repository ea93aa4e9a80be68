"""KV memory of 4 bits: K by channel over a block, V by token in groups of 32 channels.

A block is rounded when its last token is there; until then its keys and values lie in an open block
as they were computed. So how a key is read follows from two positions alone: token i reads token j
as computed while both lie in one block, rounded otherwise. Worked example, blocks of 64, token 130:

    0 … 63 rounded    64 … 127 rounded    128, 129, 130 as computed

    number ≈ offset + scale · level, levels 0 … 15, offset and scale in fp16
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headway.core.kv_format import NUMBERS
from headway.core.model_spec import KVGroupSpec
from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import Batch

GROUP = NUMBERS["int4-token"].group
LEVELS = 15


@dataclass(slots=True)
class Int4KVLayer(KVLayer):
    """Levels and scales of one layer, and the open blocks, which are a group of their own.

    Two levels a byte: K (blocks, G, D, block_size / 2), token t beside t + block_size / 2; V
    (blocks, G, block_size, D / 2), channel c of 32 beside c + 16. `k_scale` (blocks, G, D, 2) and
    `v_scale` (blocks, G, block_size, D / 32, 2) hold (scale, offset) in fp16.
    """

    k_scale: Tensor
    v_scale: Tensor
    open: KVLayer

    @property
    def block_size(self) -> int:
        return int(self.v.shape[2])

    @property
    def parts(self) -> list[Tensor]:
        """Without those of the open blocks, whose numbers are others."""
        return [self.k, self.v, self.k_scale, self.v_scale]

    def wipe(self, slots_T: Tensor) -> None:
        """The whole blocks: a channel's scale has seen all of their tokens."""
        for part in self.parts:
            part[slots_T // self.block_size] = 0

    def gather(self, blocks_B: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of consecutive full blocks in fp32, (…, B · block_size, G, D)."""
        k = unpack(self.k[blocks_B], self.k_scale[blocks_B])  # (…, B, G, D, block_size)
        levels = self.v[blocks_B].unflatten(-1, (-1, GROUP // 2))
        v = unpack(levels, self.v_scale[blocks_B]).flatten(-2)  # (…, B, G, block_size, D)
        return k.movedim(-1, -3).flatten(-4, -3), v.movedim(-2, -3).flatten(-4, -3)

    def round(self, pairs_P2: Tensor) -> None:
        """Round these (open block, block)."""
        if not len(pairs_P2):
            return
        exact, rounded = pairs_P2.unbind(1)
        shape = (len(pairs_P2), self.block_size, *self.v.shape[1:2], -1)
        k, v = (x.float().view(shape) for x in self.open.gather(exact))
        self.k[rounded], self.k_scale[rounded] = pack(k.permute(0, 2, 3, 1))
        levels, scale = pack(v.transpose(1, 2).unflatten(-1, (-1, GROUP)))
        self.v[rounded], self.v_scale[rounded] = levels.flatten(-2), scale


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """(levels, two a byte, (scale, offset)) of numbers (…, N) that share a scale."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    finite = x.isfinite().all(-1, keepdim=True)
    scale = ((high - low) / LEVELS).where(finite, torch.nan).half()
    offset = low.where(finite, torch.nan).half()
    levels = ((x - offset.float()) / scale.float()).round().nan_to_num(0.0).clamp(0, LEVELS)
    first, second = levels.where(scale > 0, 0).to(torch.uint8).chunk(2, -1)
    return first | second << 4, torch.cat([scale, offset], -1)


def unpack(levels: Tensor, scale: Tensor) -> Tensor:
    """The numbers (…, N) of levels (…, N / 2), with (scale, offset) in (…, 2)."""
    whole = torch.cat([levels & 15, levels >> 4], -1).float()
    return scale[..., 1:].float() + scale[..., :1].float() * whole


def filled_blocks(batch: Batch, layer: Int4KVLayer) -> Tensor:
    """(open block, block) of those that this step fills, (P, 2), made by a group's first layer."""
    key = -1 - layer.group
    if key not in batch.views:
        size = layer.block_size
        tables, open_tables = (
            batch.block_tables_GSB[group] for group in (layer.group, layer.open.group)
        )
        at = [
            (row, block)
            for row, (length, end) in enumerate(
                zip(batch.query_lens, batch.context_lens, strict=True)
            )
            for block in range((end - length) // size, end // size)
        ]
        rows, blocks = (torch.tensor([one[i] for one in at], dtype=torch.long) for i in (0, 1))
        batch.views[key] = torch.stack([open_tables[rows, blocks], tables[rows, blocks]], 1)
    found: Tensor = batch.views[key]
    return found


def allocate_int4(
    groups: tuple[KVGroupSpec, ...],
    num_blocks: tuple[int, ...],
    block_size: int,
    dtype: torch.dtype,
    kind: type[KVLayer],
) -> list[KVLayer]:
    """Memory of all layers, by layer index; the last of `num_blocks` are the open blocks."""
    layers: dict[int, KVLayer] = {}
    zeros = partial(torch.zeros, dtype=torch.uint8)
    scales = partial(torch.zeros, dtype=torch.half)
    for index, (group, count) in enumerate(zip(groups, num_blocks[:-1], strict=True)):
        heads, dim = group.num_kv_heads, group.head_dim
        for layer in group.layers:
            layers[layer] = Int4KVLayer(
                zeros(count, heads, dim, block_size // 2),
                zeros(count, heads, block_size, dim // 2),
                index,
                scales(count, heads, dim, 2),
                scales(count, heads, block_size, dim // GROUP, 2),
                kind.zeros((num_blocks[-1], block_size, heads, dim), len(groups), dtype, "cpu"),
            )
    return [layers[layer] for layer in sorted(layers)]


def memory_of(layers: list[KVLayer]) -> list[KVLayer]:
    """The layers, and the open blocks of those that have some: all that is copied and swapped."""
    return layers + [layer.open for layer in layers if isinstance(layer, Int4KVLayer)]
