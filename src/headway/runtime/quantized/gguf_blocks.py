"""The quantized blocks of GGUF as levels, scales and offsets: weight = level · scale + offset.

R rows, N blocks in a row, B bytes of a block. Each reader takes the blocks of some rows, (R, N, B)
in uint8, and returns levels (R, N, numbers of a block) in int8, scales and offsets (R, N, groups of
a block) in fp32. Readers of super-blocks return levels, the bytes of scales and of minima, (R, N,
groups) each, and their factors, (R, N, 1) each. The numbers have the bits of llama.cpp's. Where a
block has minima, weight = code · scale - minimum is written with the codes moved to the middle:
code q of Q4_K becomes the level q - 8 and the offset 8 · scale - minimum.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.runtime.quantized.mxfp4 import DOUBLED_VALUES
from headway.runtime.rounding import SUPER_BLOCK, RoundedWeight, SuperBlocks
from headway.spec.formats import Format, Kind, Offsets
from headway.spec.gguf.types import NumberType

Blocks = tuple[Tensor, Tensor, Tensor | None]
"""(levels, scales, offsets) of some rows."""
SuperBlockParts = tuple[Tensor, list[Tensor], list[Tensor]]
"""(levels, bytes of scales and perhaps of minima, factors of these) of some rows."""
NUMBERS_PER_PASS = 1 << 22
"""Numbers that are unpacked at a time; the temporary memory is some 64 MiB."""


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number in two bytes of each block, (R, N, 1) in fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """Return the low halves of bytes, then their high halves: (…, 16) → (…, 32), int8."""
    return torch.cat([codes & 15, codes >> 4], -1).to(torch.int8)


def fifth_bits(bytes_: Tensor) -> Tensor:
    """Return the bits of four bytes from the lowest on, times 16: (…, 4) → (…, 32), int8."""
    bits = (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (bits << 4).flatten(-2).to(torch.int8)


def q4_0(blocks: Tensor) -> Blocks:
    return nibbles(blocks[..., 2:]) - 8, half(blocks, 0), None


def q4_1(blocks: Tensor) -> Blocks:
    scale, least = half(blocks, 0), half(blocks, 2)
    return nibbles(blocks[..., 4:]) - 8, scale, 8 * scale + least


def q5_0(blocks: Tensor) -> Blocks:
    levels = nibbles(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6])
    return levels - 16, half(blocks, 0), None


def q5_1(blocks: Tensor) -> Blocks:
    scale, least = half(blocks, 0), half(blocks, 2)
    levels = nibbles(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8])
    return levels - 16, scale, 16 * scale + least


def q8_0(blocks: Tensor) -> Blocks:
    return blocks[..., 2:].contiguous().view(torch.int8), half(blocks, 0), None


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits from 12 bytes: (…, 12) → two (…, 8).

    The first four of each are the low 6 bits of a byte. The others have 4 bits in the last four
    bytes and 2 in the upper bits of the first eight.
    """
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], -1)
    return scales, minima


def q4_k(blocks: Tensor) -> SuperBlockParts:
    """Read 256 numbers: d, dmin, 12 bytes of scales, four times 32 bytes of two sub-blocks each."""
    levels = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return levels - 8, [*scales_and_minima(blocks[..., 4:16])], [half(blocks, 0), half(blocks, 2)]


def q5_k(blocks: Tensor) -> SuperBlockParts:
    """Read Q4_K with 32 bytes of fifth bits: bit b of each belongs to sub-block b."""
    fifths = (blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    low = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    levels = low | (fifths << 4).transpose(-1, -2).flatten(-2).to(torch.int8)
    return levels - 16, [*scales_and_minima(blocks[..., 4:16])], [half(blocks, 0), half(blocks, 2)]


def two_bits(packed: Tensor) -> Tensor:
    """Return four codes of 2 bits from each byte, by 32 bytes: (…, 64) → (…, 256) in uint8.

    Byte l of the first 32 holds the numbers l, 32 + l, 64 + l and 96 + l.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return ((packed.unflatten(-1, (2, 1, 32)) >> shifts) & 3).flatten(-3)


def q6_k(blocks: Tensor) -> SuperBlockParts:
    """Read 128 bytes of low nibbles, 64 of two high bits, 16 scales in int8, d."""
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    low = nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = (two_bits(blocks[..., 128:192]) << 4).to(torch.int8)
    return (low | high) - 32, [scales], [half(blocks, 208)]


def q3_k(blocks: Tensor) -> SuperBlockParts:
    """Read 32 bytes of third bits, 64 of two low bits, 12 of scales of 6 bits minus 32, d."""
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    tops = (high[..., None, :] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    codes = torch.cat([low & 15, low >> 4], -1) | (tops.flatten(-2) << 4)
    thirds = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    levels = two_bits(blocks[..., 32:96]) | (thirds.flatten(-2) << 2)
    return levels.to(torch.int8) - 4, [codes.to(torch.int8) - 32], [half(blocks, 108)]


def q2_k(blocks: Tensor) -> Blocks:
    """Read 16 bytes of a scale and a minimum of 4 bits, 64 of codes of 2 bits, d, dmin."""
    scales, minima = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    levels = two_bits(blocks[..., 16:80]).to(torch.int8)
    return levels, half(blocks, 80) * scales, -(half(blocks, 82) * minima)


IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of IQ4's codes."""


def look_up(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    return torch.tensor(levels, dtype=torch.int8)[codes.int()]


def iq4_nl(blocks: Tensor) -> Blocks:
    return look_up(nibbles(blocks[..., 2:]), IQ4_LEVELS), half(blocks, 0), None


def iq4_xs(blocks: Tensor) -> SuperBlockParts:
    """Read d, 2 bytes of high bits of 8 scales, 4 of low nibbles, 8 times 16 of codes."""
    tops = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    scales = (low | (tops.flatten(-2) << 4)).to(torch.int8) - 32
    codes = nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return look_up(codes, IQ4_LEVELS), [scales], [half(blocks, 0)]


def mxfp4(blocks: Tensor) -> Blocks:
    """Read a power of two for 32 numbers of e2m1; it is halved because the levels are doubled."""
    exponent = blocks[..., :1].int()
    scale = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return look_up(nibbles(blocks[..., 1:]), DOUBLED_VALUES), scale.view(torch.float32), None


@dataclass(frozen=True, slots=True)
class Packing:
    """The reader of one type of block, and the format that holds its numbers exactly."""

    read: Callable[[Tensor], Blocks | SuperBlockParts]
    format: Format


def super_block_format(kind: Kind, group: int, offsets: Offsets = "none") -> Format:
    """Return the format of super-blocks."""
    return Format(kind, group, True, offsets, super_block=SUPER_BLOCK)


PACKINGS = {
    "Q4_0": Packing(q4_0, Format("int4", 32)),
    "Q4_1": Packing(q4_1, Format("int4", 32, offsets="any")),
    "Q5_0": Packing(q5_0, Format("int8", 32)),
    "Q5_1": Packing(q5_1, Format("int8", 32, offsets="any")),
    "Q8_0": Packing(q8_0, Format("int8", 32)),
    "Q2_K": Packing(q2_k, Format("int8", 16, fp32_scales=True, offsets="any")),
    "Q3_K": Packing(q3_k, super_block_format("int8", 16)),
    "Q4_K": Packing(q4_k, super_block_format("int4", 32, "any")),
    "Q5_K": Packing(q5_k, super_block_format("int8", 32, "any")),
    "Q6_K": Packing(q6_k, super_block_format("int8", 16)),
    "IQ4_NL": Packing(iq4_nl, Format("int8", 32)),
    "IQ4_XS": Packing(iq4_xs, super_block_format("int8", 32)),
    "MXFP4": Packing(mxfp4, Format("int8", 32, fp32_scales=True)),
}
"""Name of a GGUF type → its packing."""


def unpack(raw_RB: Tensor, type: NumberType) -> RoundedWeight:
    """Return rows of blocks, (R, bytes of a row) in uint8, as levels and scales."""
    packing = PACKINGS[type.name]
    blocks = raw_RB.unflatten(-1, (-1, type.size))
    rows = max(1, NUMBERS_PER_PASS // (blocks.shape[1] * type.block))
    chunks = [unpack_chunk(packing, some) for some in blocks.split(rows)]
    return chunks[0] if len(chunks) == 1 else RoundedWeight.joined(chunks)


def unpack_chunk(packing: Packing, blocks: Tensor) -> RoundedWeight:
    """Return the weight of some rows of blocks."""
    levels, scales, offsets = packing.read(blocks)
    kind, group, supers = packing.format.kind, packing.format.group, None
    if isinstance(scales, list):
        assert isinstance(offsets, list)
        supers = super_blocks(scales, offsets)
        scales, offsets = supers.scales_and_offsets(kind, group)
    assert not isinstance(offsets, list)
    offsets_OG = None if offsets is None else offsets.flatten(1)
    return RoundedWeight(
        levels.flatten(1), scales.flatten(1), group, offsets_OG, kind=kind, supers=supers
    )


def super_blocks(codes: list[Tensor], factors: list[Tensor]) -> SuperBlocks:
    """Return the scales, and minima if any, of some rows."""
    return SuperBlocks(
        torch.stack([part.to(torch.int8).flatten(1) for part in codes]),
        torch.stack([part.half().flatten(1) for part in factors]),
    )
