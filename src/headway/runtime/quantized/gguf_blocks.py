"""The quantized blocks of GGUF as levels, scales and offsets: weight = level · scale + offset.

R rows, N blocks in a row, B bytes of a block. Each function here takes the blocks of some rows,
(R, N, B) in uint8, and returns levels (R, N, numbers of a block) in int8, and scales and offsets
(R, N, groups of a block) in fp32. The numbers are those that llama.cpp multiplies, to the bit;
where a block has minima, weight = code · scale - minimum is written with the codes moved to the
middle: Q4_K's code q becomes the level q - 8, and the offset 8 · scale - minimum.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.formats import Format
from headway.core.gguf.types import NumberType
from headway.runtime.rounding import RoundedWeight

Blocks = tuple[Tensor, Tensor, Tensor | None]
"""(levels, scales, offsets) of some rows."""
NUMBERS_AT_ONCE = 1 << 22
"""Numbers that are unpacked at a time: what is made on the way takes some 64 MiB."""


def half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number in two bytes of each block, (R, N, 1) in fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """The low halves of some bytes, then their high halves: (…, 16) → (…, 32), int8."""
    return torch.cat([codes & 15, codes >> 4], -1).to(torch.int8)


def fifth_bits(bytes_: Tensor) -> Tensor:
    """The bits of four bytes from the lowest on, as 16s: (…, 4) → (…, 32), int8."""
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
    """Eight scales and eight minima of 6 bits out of 12 bytes: (…, 12) → two (…, 8) in fp32.

    The first four of each are the low 6 bits of a byte; the others have 4 bits in the last four
    bytes and 2 in what the first eight have left.
    """
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], -1)
    return scales.float(), minima.float()


def q4_k(blocks: Tensor) -> Blocks:
    """256 numbers: d, dmin, 12 bytes of scales, four times 32 bytes of two sub-blocks each."""
    scales, minima = scales_and_minima(blocks[..., 4:16])
    scale, least = half(blocks, 0) * scales, half(blocks, 2) * minima
    levels = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return levels - 8, scale, 8 * scale - least


def q5_k(blocks: Tensor) -> Blocks:
    """As Q4_K, with 32 bytes of fifth bits: of sub-block b the b-th bit of each."""
    scales, minima = scales_and_minima(blocks[..., 4:16])
    scale, least = half(blocks, 0) * scales, half(blocks, 2) * minima
    fifths = (blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    low = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    levels = low | (fifths << 4).transpose(-1, -2).flatten(-2).to(torch.int8)
    return levels - 16, scale, 16 * scale - least


def two_bits(packed: Tensor) -> Tensor:
    """Four codes of 2 bits out of each byte, by 32 bytes: (…, 64) → (…, 256) in uint8.

    Byte l of the first 32 holds the numbers l, 32 + l, 64 + l and 96 + l.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return ((packed.unflatten(-1, (2, 1, 32)) >> shifts) & 3).flatten(-3)


def q6_k(blocks: Tensor) -> Blocks:
    """128 bytes of low nibbles, 64 of two high bits, 16 scales in int8, d."""
    scale = half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    low = nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = (two_bits(blocks[..., 128:192]) << 4).to(torch.int8)
    return (low | high) - 32, scale, None


def q3_k(blocks: Tensor) -> Blocks:
    """32 bytes of third bits, 64 of two low bits, 12 of scales of 6 bits less 32, d."""
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    tops = (high[..., None, :] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    codes = torch.cat([low & 15, low >> 4], -1) | (tops.flatten(-2) << 4)
    thirds = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    levels = two_bits(blocks[..., 32:96]) | (thirds.flatten(-2) << 2)
    return levels.to(torch.int8) - 4, half(blocks, 108) * (codes.float() - 32), None


def q2_k(blocks: Tensor) -> Blocks:
    """16 bytes of a scale and a minimum of 4 bits, 64 of codes of 2 bits, d, dmin."""
    scales, minima = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    levels = two_bits(blocks[..., 16:80]).to(torch.int8)
    return levels, half(blocks, 80) * scales, -(half(blocks, 82) * minima)


UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels that IQ4's codes stand for."""
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of e2m1."""


def looked_up(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    return torch.tensor(levels, dtype=torch.int8)[codes.int()]


def iq4_nl(blocks: Tensor) -> Blocks:
    return looked_up(nibbles(blocks[..., 2:]), UNEVEN), half(blocks, 0), None


def iq4_xs(blocks: Tensor) -> Blocks:
    """d, 2 bytes of two high bits of eight scales, 4 of their low nibbles, 8 times 16 of codes."""
    tops = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    scale = half(blocks, 0) * ((low | (tops.flatten(-2) << 4)).float() - 32)
    codes = nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return looked_up(codes, UNEVEN), scale, None


def mxfp4(blocks: Tensor) -> Blocks:
    """A power of two for 32 numbers of e2m1, halved as the levels are doubled."""
    exponent = blocks[..., :1].int()
    scale = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return looked_up(nibbles(blocks[..., 1:]), FP4), scale.view(torch.float32), None


@dataclass(frozen=True, slots=True)
class Packing:
    """How one type of block is read, and the format that holds its numbers exactly."""

    read: Callable[[Tensor], Blocks]
    format: Format


PACKINGS = {
    "Q4_0": Packing(q4_0, Format("int4", 32)),
    "Q4_1": Packing(q4_1, Format("int4", 32, offsets="any")),
    "Q5_0": Packing(q5_0, Format("int8", 32)),
    "Q5_1": Packing(q5_1, Format("int8", 32, offsets="any")),
    "Q8_0": Packing(q8_0, Format("int8", 32)),
    "Q2_K": Packing(q2_k, Format("int8", 16, fp32_scales=True, offsets="any")),
    "Q3_K": Packing(q3_k, Format("int8", 16, fp32_scales=True)),
    "Q4_K": Packing(q4_k, Format("int4", 32, fp32_scales=True, offsets="any")),
    "Q5_K": Packing(q5_k, Format("int8", 32, fp32_scales=True, offsets="any")),
    "Q6_K": Packing(q6_k, Format("int8", 16, fp32_scales=True)),
    "IQ4_NL": Packing(iq4_nl, Format("int8", 32)),
    "IQ4_XS": Packing(iq4_xs, Format("int8", 32, fp32_scales=True)),
    "MXFP4": Packing(mxfp4, Format("int8", 32, fp32_scales=True)),
}
"""By the name of the type."""


def unpack(raw_RB: Tensor, type: NumberType) -> RoundedWeight:
    """Rows of blocks, (R, bytes of a row) in uint8, as levels and scales."""
    packing = PACKINGS[type.name]
    blocks = raw_RB.unflatten(-1, (-1, type.size))
    rows = max(1, NUMBERS_AT_ONCE // (blocks.shape[1] * type.block))
    found: list[list[Tensor]] = [[], [], []]
    for some in blocks.split(rows):
        for kept, part in zip(found, packing.read(some), strict=True):
            if part is not None:
                kept.append(part.flatten(1))
    levels, scales, offsets = (torch.cat(kept) if kept else None for kept in found)
    assert levels is not None and scales is not None
    format = packing.format
    return RoundedWeight(levels, scales, format.group, offsets_OG=offsets, kind=format.kind)
