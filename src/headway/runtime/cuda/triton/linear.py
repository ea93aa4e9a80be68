"""Products of 16-bit activations with weights of 16 bits, FP8 or int8, with one tile for all.

A program computes BLOCK_T rows and some outputs, for any number of rows, and adds up the inputs in
steps from the first to the last: the bits of a row depend neither on the other rows nor on whether
it belongs to a prompt or a decode. Weights are widened in the tile (W8A16). A byte of e4m3, s eeee
mmm, is the fp16 number s 0eeee mmm0000000 times 256, subnormal numbers too; the 256 is in the
scales:

    0x38 = 1.0    0 0111 000 → 0 00111 0000000000 = 2^-8

Weights of several experts are concatenated, and the rows are sorted by expert: each tile looks up
its expert in numbers that are on the device. T rows, H inputs, O outputs, G groups of inputs with a
scale, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runtime.cuda.triton.types import TYPES, dot_type
from headway.runtime.kernels.grouped import EXPERT_TILE, Visits, max_tiles
from headway.runtime.rounding import RoundedWeight

BLOCK_T = EXPERT_TILE
STEP = 64
"""Inputs of one step, at most; with group scales a power of two that divides a group."""
ROW_TILES_TOGETHER = 8
"""Consecutive tiles of rows that read the same weights while these are in a cache."""
WIDE = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
E4M3_FACTOR = 256.0


@triton.jit
def tile_of(tile, starts, tiles, T, E, BLOCK_T: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (expert, first row, end of its rows) of a tile; no rows for a tile behind the last."""
    expert, first, end = 0, tile * BLOCK_T, T
    if EXPERTS:
        low, high = 0, E  # the last expert whose tiles begin at or before this one
        while low < high:
            middle = (low + high) // 2
            if tl.load(tiles + middle) <= tile:
                low = middle + 1
            else:
                high = middle
        expert = low - 1
        first = tl.load(starts + expert) + (tile - tl.load(tiles + expert)) * BLOCK_T
        end = tl.load(starts + expert + 1)
    return expert, first, end


@triton.jit
def swizzled(tiles_t, tiles_o, TOGETHER: tl.constexpr):
    """Return (tile of rows, tile of outputs) of a program; groups of row tiles alternate."""
    pid = tl.program_id(0)
    each = TOGETHER * tiles_o
    begin = pid // each * TOGETHER
    count = tl.minimum(tiles_t - begin, TOGETHER)
    return begin + pid % each % count, pid % each // count


@triton.jit
def as_dot(x, DOT: tl.constexpr):
    """Return x in the type of products, through fp32 where it has another."""
    if x.dtype == DOT:
        return x
    return x.to(tl.float32).to(DOT)


@triton.jit
def widened(numbers, KIND: tl.constexpr, DOT: tl.constexpr):
    """Return loaded weights in the type of products; those of e4m3 divided by 256."""
    if KIND == "fp8":
        code = numbers.to(tl.int32)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        numbers = half.to(tl.uint16).to(tl.float16, bitcast=True)
    return as_dot(numbers, DOT)


@triton.jit(do_not_specialize=["T", "tiles_t"])
def linear_kernel(
    out, x, weight, scales, bias, starts, tiles, T, O, H, x_stride, G, E, tiles_t, tiles_o,
    KIND: tl.constexpr, STEP: tl.constexpr, STEPS_A_GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, TOGETHER: tl.constexpr, BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, DOT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_T rows and BLOCK_O outputs per program."""
    tile_t, tile_o = swizzled(tiles_t, tiles_o, TOGETHER)
    expert, first, end = tile_of(tile_t, starts, tiles, T, E, BLOCK_T, EXPERTS)
    if first < end:
        t, o, i = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_O), tl.arange(0, STEP)
        live_t, live_o = t < end - first, o < O - tile_o * BLOCK_O
        row = tl.cast(expert, tl.int64) * O + tile_o * BLOCK_O  # one wide number, narrow offsets
        x += tl.cast(first, tl.int64) * x_stride
        weight += row * H
        total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for step in range(0, tl.cdiv(H, STEP)):
            at = step * STEP + i
            there_x, there_w = live_t[:, None], live_o[None, :]
            if not EVEN:
                there_x, there_w = there_x & (at < H)[None, :], there_w & (at < H)[:, None]
            inputs = tl.load(x + (t[:, None] * x_stride + at[None, :]), mask=there_x, other=0.0)
            numbers = tl.load(weight + (o[None, :] * H + at[:, None]), mask=there_w, other=0)
            inputs, wide = as_dot(inputs, DOT), widened(numbers, KIND, DOT)
            if STEPS_A_GROUP:
                place = row * G + (o * G + step // STEPS_A_GROUP)
                scale = tl.load(scales + place, mask=live_o, other=0.0)
                total += tl.dot(inputs, wide, input_precision="ieee") * scale[None, :]
            else:
                total = tl.dot(inputs, wide, acc=total, input_precision="ieee")
        if KIND != "plain" and not STEPS_A_GROUP:
            total = total * tl.load(scales + row + o, mask=live_o, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + row + o, mask=live_o, other=0.0).to(tl.float32)[None, :]
        out += tl.cast(first, tl.int64) * O + tile_o * BLOCK_O
        both = live_t[:, None] & live_o[None, :]
        tl.store(out + (t[:, None] * O + o[None, :]), total.to(TYPE), mask=both)


@dataclass(frozen=True, slots=True)
class WideWeight:
    """A matrix in the kernel's form: bytes (O, H) and fp32 scales (O, G); of experts (E, …).

    `step` is the number of inputs that the kernel takes at once, `group` how many share a scale; 0:
    all.
    """

    levels: Tensor
    scales: Tensor
    kind: str
    group: int
    step: int

    @property
    def nbytes(self) -> int:
        return int(self.levels.nbytes + self.scales.nbytes)


def step_of(group: int) -> int:
    """Return the largest power of two up to STEP that divides a group; STEP without groups."""
    return min(group & -group, STEP) if group else STEP


def pack(weight: RoundedWeight) -> WideWeight:
    """Return the weight in the kernel's form."""
    kind = WIDE[weight.levels_OH.dtype]
    levels = weight.levels_OH.view(torch.uint8) if kind == "fp8" else weight.levels_OH
    scales = weight.scales_OG * E4M3_FACTOR if kind == "fp8" else weight.scales_OG
    group = weight.group
    return WideWeight(levels.contiguous(), scales.contiguous(), kind, group, step_of(group))


def stack(weights: list[WideWeight]) -> WideWeight:
    """Return the weights of several experts as one."""
    levels = torch.stack([one.levels for one in weights])
    scales = torch.stack([one.scales for one in weights])
    return WideWeight(levels, scales, weights[0].kind, weights[0].group, weights[0].step)


def outputs_a_tile(outputs: int, dtype: torch.dtype) -> int:
    """Return a layer's outputs per tile: from 4,096 outputs on 128 programs for one row."""
    if dtype == torch.float32:
        return 32
    return 128 if outputs >= 16_384 else 64 if outputs >= 8192 else 32


def warps_of(block_o: int) -> int:
    """Return the warps of a tile; with 4 a tile of 128 outputs spills registers."""
    return 8 if block_o >= 128 else 4


def linear(
    x_TH: Tensor,
    weight: Tensor | WideWeight,
    bias: Tensor | None = None,
    visits: Visits | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias, (T, O), in the type of x.

    Products are computed in the type of an unquantized weight, or else in `dtype`, by default that
    of x; rows of another type are rounded to it. With `visits` weight and bias are those of all
    experts, (E, O, H) and (E, O), and the rows are sorted by expert.
    """
    plain, out_dtype = isinstance(weight, Tensor), x_TH.dtype
    numbers: Any = weight if isinstance(weight, Tensor) else weight.levels
    scales: Any = numbers if isinstance(weight, Tensor) else weight.scales
    kind, step, group = ("plain", STEP, 0) if plain else (weight.kind, weight.step, weight.group)  # type: ignore[union-attr]
    x_TH = x_TH.to(numbers.dtype if plain else dtype or out_dtype)
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    tokens, inputs, outputs = *x_TH.shape, numbers.shape[-2]
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=x_TH.device)
    if not tokens:
        return out
    experts = 0 if visits is None else numbers.shape[0]
    block_o = outputs_a_tile(outputs, x_TH.dtype)
    tiles_t = max_tiles(tokens, experts) if visits is not None else triton.cdiv(tokens, BLOCK_T)
    tiles_o = triton.cdiv(outputs, block_o)
    linear_kernel[(tiles_t * tiles_o,)](
        out, x_TH, numbers, scales, numbers if bias is None else bias,
        numbers if visits is None else visits.starts_E1,
        numbers if visits is None else visits.tiles_E1,
        tokens, outputs, inputs, x_TH.stride(0), scales.shape[-1], experts, tiles_t, tiles_o,
        kind, step, group // step, inputs % step == 0, BLOCK_T, block_o, ROW_TILES_TOGETHER,
        bias is not None, visits is not None, dot_type(x_TH.dtype), TYPES[out_dtype],
        num_warps=warps_of(block_o), num_stages=3,
    )  # fmt: skip
    return out
