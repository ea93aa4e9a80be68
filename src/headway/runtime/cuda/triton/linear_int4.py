"""Weights of 4 bits times activations of 16: unpacked in the tile, multiplied in the model's type.

A group of g inputs is g / 2 bytes: byte i has input i in its low half and input i + g / 2 in its
high half, each as level + 8. Example, a group of 4 with the levels [-8 7 0 1]:

    bytes   (0 | 8 << 4), (15 | 9 << 4)

Products of a group are summed in fp32 and then scaled, group after group: one algorithm for every
number of rows. T tokens, H inputs, O outputs, G groups.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headway.runtime.cuda.triton.linear import tile_of
from headway.runtime.cuda.triton.types import TYPES, dot_type
from headway.runtime.kernels.grouped import EXPERT_TILE, Visits, max_tiles
from headway.runtime.rounding import RoundedWeight

BLOCK_T, BLOCK_O = EXPERT_TILE, 64
"""The tile, the same for any number of rows, so that a row's bits do not depend on it."""


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    out, x, packed, scales, offsets, bias, starts, tiles, T, O, H, x_stride, G, E,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, OFFSETS: tl.constexpr,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, DOT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_T tokens and BLOCK_O outputs per program."""
    HALF: tl.constexpr = GROUP // 2
    expert, begin, end = tile_of(tl.program_id(1), starts, tiles, T, E, BLOCK_T, EXPERTS)
    if begin < end:
        t = begin + tl.arange(0, BLOCK_T)
        o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        place = expert.to(tl.int64) * O + o if EXPERTS else o.to(tl.int64)
        i = tl.arange(0, HALF)
        live_t, live_o = t < end, o < O
        total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for g in range(G):
            inputs = g * GROUP + i
            row = x + t.to(tl.int64)[:, None] * x_stride
            low_live = live_t[:, None] & (inputs < H)[None, :]
            high_live = live_t[:, None] & (inputs + HALF < H)[None, :]
            low = tl.load(row + inputs[None, :], mask=low_live, other=0.0).to(tl.float32)
            high = tl.load(row + (inputs + HALF)[None, :], mask=high_live, other=0.0).to(tl.float32)
            at = place[None, :] * (G * HALF) + (g * HALF + i)[:, None]
            both = tl.load(packed + at, mask=live_o[None, :], other=136).to(tl.int32)
            first = ((both & 15) - 8).to(tl.float32).to(DOT)
            second = ((both >> 4) - 8).to(tl.float32).to(DOT)
            sums = tl.dot(low.to(DOT), first, input_precision="ieee")
            sums = tl.dot(high.to(DOT), second, acc=sums, input_precision="ieee")
            scale = tl.load(scales + place * G + g, mask=live_o, other=0.0).to(tl.float32)
            total += sums * scale[None, :]
            if OFFSETS:
                offset = tl.load(offsets + place * G + g, mask=live_o, other=0.0).to(tl.float32)
                total += (tl.sum(low, 1) + tl.sum(high, 1))[:, None] * offset[None, :]
        if BIAS:
            total += tl.load(bias + place, mask=live_o, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + t.to(tl.int64)[:, None] * O + o[None, :], total.to(TYPE),
            mask=live_t[:, None] & live_o[None, :],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A matrix in the kernel's form: bytes (O, G · g / 2), scales and offsets (O, G)."""

    packed: Tensor
    scales_OG: Tensor
    offsets_OG: Tensor | None
    order_H: Tensor | None
    group: int
    inputs: int

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales_OG, self.offsets_OG, self.order_H)
        return sum(part.nbytes for part in parts if part is not None)


def pack(weight: RoundedWeight) -> PackedInt4:
    """Return the weight in the kernel's form; the last group is padded with zeros."""
    group, inputs = weight.group, weight.levels_OH.shape[1]
    levels = functional.pad(weight.levels_OH, (0, -inputs % group)).unflatten(1, (-1, group))
    codes = (levels + 8).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    packed = (low | high << 4).flatten(1).contiguous()
    exact = torch.equal(weight.scales_OG.half().float(), weight.scales_OG)
    scales = weight.scales_OG.half() if exact else weight.scales_OG
    order = None if weight.order_H is None else weight.order_H.long()
    return PackedInt4(packed, scales.contiguous(), weight.offsets_OG, order, group, inputs)


def stack(weights: list[PackedInt4]) -> PackedInt4:
    """Return the weights of several experts as one; none has an input order of its own."""
    scales = [one.scales_OG for one in weights]
    if len({part.dtype for part in scales}) > 1:
        scales = [part.float() for part in scales]
    offsets = [one.offsets_OG for one in weights]
    given = [
        torch.zeros_like(scale, dtype=torch.float32) if offset is None else offset
        for offset, scale in zip(offsets, scales, strict=True)
    ]
    return PackedInt4(
        torch.stack([one.packed for one in weights]),
        torch.stack(scales),
        None if all(one is None for one in offsets) else torch.stack(given),
        None,
        weights[0].group,
        weights[0].inputs,
    )


def linear_int4(
    x_TH: Tensor,
    weight: PackedInt4,
    bias: Tensor | None,
    visits: Visits | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias, (T, O), in the type of x.

    Products are computed in `dtype`, by default that of x; rows of another type are rounded to it.
    With `visits` weight and bias are those of all experts, (E, …), and the rows are sorted by
    expert.
    """
    out_dtype = x_TH.dtype
    x_TH = x_TH.to(dtype or out_dtype)
    if weight.order_H is not None:
        x_TH = x_TH.index_select(1, weight.order_H)
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    tokens, outputs = x_TH.shape[0], weight.packed.shape[-2]
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=x_TH.device)
    if not tokens:
        return out
    groups, experts = weight.scales_OG.shape[-1], 0 if visits is None else len(weight.packed)
    tiles = triton.cdiv(tokens, BLOCK_T) if visits is None else max_tiles(tokens, experts)
    linear_kernel[(triton.cdiv(outputs, BLOCK_O), tiles)](
        out, x_TH, weight.packed, weight.scales_OG,
        weight.scales_OG if weight.offsets_OG is None else weight.offsets_OG,
        weight.scales_OG if bias is None else bias,
        weight.packed if visits is None else visits.starts_E1,
        weight.packed if visits is None else visits.tiles_E1,
        tokens, outputs, weight.inputs, x_TH.stride(0), groups, experts,
        weight.group, BLOCK_T, BLOCK_O, weight.offsets_OG is not None, bias is not None,
        visits is not None, dot_type(x_TH.dtype), TYPES[out_dtype],
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
