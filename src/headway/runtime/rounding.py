"""Round weights and activations to small integers with scales: the definition, in plain torch.

T tokens, H inputs, O outputs of a linear layer, G groups of inputs that share a scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from headway.spec.formats import Format, Kind, Offsets

SUPER_BLOCK = 256
LEVELS = {"int8": (-127, 127), "int4": (-8, 7)}
"""Levels of weights rounded here; int8 of a checkpoint may have -128 too."""
MAX_FP8 = 448.0
"""The largest number of type e4m3."""
SMALLEST_BLOCK = 1e-30
"""A block counts as zeros unless its largest number is above this."""
MAX_ROTATION = 64
SCALE_FACTORS = (1.0, 0.7, 0.75, 0.8, 0.84, 0.88, 0.92, 0.96, 1.04)
"""Scales tried for a group of int4, relative to the scale that reaches its largest number."""
MIN_POWER_SHARE = 0.01
"""Lower bound of the power of an input, relative to the mean power."""
MAX_ROUNDED_NUMBERS = 1 << 22
"""Weights that are copied to fp32 at once: 16 MiB."""


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """Scales and minima of groups as bytes times numbers in fp16.

    K is 1 or 2 parts: `codes_KOG` int8, `factors_KOS` fp16, one for each super-block of inputs.
    scale = factor · code of part 0; minimum = the same of part 1; offset = 8 · scale - minimum, of
    int8 levels 16 · scale - minimum, rounded once.
    """

    codes_KOG: Tensor
    factors_KOS: Tensor

    def scales_and_offsets(self, kind: Kind, group: int) -> tuple[Tensor, Tensor | None]:
        """Return (scales (O, G), offsets (O, G) where there are minima) in fp32."""
        factors = self.factors_KOS.float().repeat_interleave(SUPER_BLOCK // group, -1)
        numbers = factors[..., : self.codes_KOG.shape[-1]] * self.codes_KOG.float()
        scales = numbers[0]
        middle = 8 if kind == "int4" else 16
        return scales, middle * scales - numbers[1] if len(numbers) > 1 else None

    def rows(self, some: slice) -> "SuperBlocks":
        """Return those of some outputs."""
        return SuperBlocks(self.codes_KOG[:, some], self.factors_KOS[:, some])

    def columns(self, groups: slice, blocks: slice) -> "SuperBlocks":
        """Return those of some groups and their super-blocks."""
        return SuperBlocks(self.codes_KOG[..., groups], self.factors_KOS[..., blocks])

    @staticmethod
    def joined(parts: "Sequence[SuperBlocks | None]") -> "SuperBlocks | None":
        """Concatenate by outputs; None where a part has none or another number of parts."""
        given = [part for part in parts if part is not None]
        if len(given) < len(parts) or len({len(part.codes_KOG) for part in given}) > 1:
            return None
        codes = torch.cat([part.codes_KOG for part in given], 1)
        return SuperBlocks(codes, torch.cat([part.factors_KOS for part in given], 1))


@dataclass(frozen=True)
class RoundedWeight:
    """weight[:, order] = level · scale + offset, by groups of inputs; the last may be smaller.

    Levels (O, H) are int8, of fp8 they are float8_e4m3fn; scales (O, G) are fp32, finite, of either
    sign; `group` 0: all inputs of an output share one. Offsets (O, G) are fp32, if any. Where the
    levels have another order than the inputs, they multiply x[:, order_H]. The default `kind` is
    int4 with a group and int8 without. `supers` are the super-blocks of scales and offsets, if any.
    With `rotated` the numbers are `rotate(weight)` / the rotation's size, and multiply rotated
    inputs.

    AWQ's code q with zero z: level q - 8, offset scale · (8 - z). Q4_K's with scale d and minimum
    m: level q - 8, offset 8 · d - m.
    """

    levels_OH: Tensor
    scales_OG: Tensor
    group: int
    offsets_OG: Tensor | None = None
    order_H: Tensor | None = None
    kind: Kind = "none"
    supers: SuperBlocks | None = None
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.kind == "none":
            fp8 = self.levels_OH.dtype == torch.float8_e4m3fn
            object.__setattr__(self, "kind", "fp8" if fp8 else "int4" if self.group else "int8")
        outputs, inputs = self.levels_OH.shape
        groups = -(-inputs // self.group) if self.group else 1
        assert self.scales_OG.shape == (outputs, groups), "a scale for each output and group"
        assert self.offsets_OG is None or self.offsets_OG.shape == (outputs, groups)
        assert self.order_H is None or self.order_H.shape == (inputs,)

    @property
    def nbytes(self) -> int:
        parts = (self.levels_OH, self.scales_OG, self.offsets_OG, self.order_H)
        return sum(int(part.nbytes) for part in parts if part is not None)

    @property
    def super_block(self) -> int:
        """Inputs of a super-block; 0 without."""
        return SUPER_BLOCK if self.supers is not None else 0

    @cached_property
    def format(self) -> Format:
        """The narrowest format that holds exactly these numbers."""
        if self.supers is not None:
            offsets: Offsets = "none" if self.offsets_OG is None else "any"
            permuted = self.order_H is not None
            return Format(self.kind, self.group, True, offsets, permuted, self.super_block)
        exact = not self.group or self.kind == "fp8"
        fp32_scales = not exact and not torch.equal(self.scales_OG.half().float(), self.scales_OG)
        offsets = "none" if self.offsets_OG is None else "any"
        if self.zeros() is not None:
            offsets = "zeros"
        return Format(
            self.kind,
            self.group,
            fp32_scales,
            offsets,
            permuted=self.order_H is not None,
            rotated=self.rotated,
        )

    def fits(self, format: Format) -> bool:
        """Return whether `format` holds exactly these numbers."""
        own = self.format
        return (
            (own.kind, own.group, own.permuted, own.rotated)
            == (format.kind, format.group, format.permuted, format.rotated)
            and own.fp32_scales <= format.fp32_scales
            and format.super_block in (0, own.super_block)
            and ("none", "zeros", "any").index(own.offsets)
            <= ("none", "zeros", "any").index(format.offsets)
        )

    def zeros(self) -> Tensor | None:
        """Return int8 zero points (O, G), -8 … 8: offset = scale · zero point; None without."""
        if self.offsets_OG is None:
            return None
        numbers = (self.offsets_OG / self.scales_OG).nan_to_num(0, 0, 0).round().clamp(-8, 8)
        return (
            numbers.to(torch.int8)
            if torch.equal(numbers * self.scales_OG, self.offsets_OG)
            else None
        )

    def plain(self) -> Tensor:
        """Return the dequantized weights (O, H) in fp32, in the order of the inputs."""
        inputs = self.levels_OH.shape[1]
        size = self.group or inputs
        weight_OH = self.levels_OH.float() * self.scales_OG.repeat_interleave(size, 1)[:, :inputs]
        if self.offsets_OG is not None:
            weight_OH += self.offsets_OG.repeat_interleave(size, 1)[:, :inputs]
        if self.rotated:
            return rotate(weight_OH)
        if self.order_H is None:
            return weight_OH
        ordered_OH = torch.empty_like(weight_OH)
        ordered_OH[:, self.order_H.long()] = weight_OH
        return ordered_OH

    def rows(self, some: slice) -> "RoundedWeight":
        """Return some outputs."""
        offsets = self.offsets_OG
        return replace(
            self,
            levels_OH=self.levels_OH[some],
            scales_OG=self.scales_OG[some],
            offsets_OG=None if offsets is None else offsets[some],
            supers=self.supers and self.supers.rows(some),
        )

    def columns(self, some: slice) -> "RoundedWeight":
        """Return some inputs: whole groups and super-blocks, without a permutation."""
        assert self.order_H is None and not self.rotated
        groups = group_slice(some, self.group) if self.group else slice(None)
        offsets = self.offsets_OG
        return replace(
            self,
            levels_OH=self.levels_OH[:, some],
            scales_OG=self.scales_OG[:, groups],
            offsets_OG=None if offsets is None else offsets[:, groups],
            supers=self.supers and self.supers.columns(groups, group_slice(some, SUPER_BLOCK)),
        )

    @staticmethod
    def joined(parts: "Sequence[RoundedWeight]") -> "RoundedWeight":
        """Concatenate parts by outputs: of one kind and group, with the same order of inputs.

        Where one part has offsets, the others get offsets of 0.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        assert len({(part.kind, part.group, part.rotated) for part in parts}) == 1
        orders = [part.order_H for part in parts if part.order_H is not None]
        assert not orders or len(orders) == len(parts)
        assert all(torch.equal(order, orders[0]) for order in orders)
        return RoundedWeight(
            torch.cat([part.levels_OH for part in parts]),
            torch.cat([part.scales_OG for part in parts]),
            first.group,
            joined_offsets(parts),
            first.order_H,
            first.kind,
            SuperBlocks.joined([part.supers for part in parts]),
            first.rotated,
        )


def group_slice(inputs: slice, size: int) -> slice:
    """Return the groups of `size` inputs that cover these inputs.

    >>> group_slice(slice(64, 160), 64)
    slice(1, 3, None)
    """
    assert inputs.start % size == 0
    return slice(inputs.start // size, -(-inputs.stop // size))


def joined_offsets(parts: Sequence[RoundedWeight]) -> Tensor | None:
    """Concatenate the offsets of parts: 0 where a part has none; None where no part has any."""
    if all(part.offsets_OG is None for part in parts):
        return None
    return torch.cat(
        [
            torch.zeros_like(part.scales_OG) if part.offsets_OG is None else part.offsets_OG
            for part in parts
        ]
    )


def round_weight(weight_OH: Tensor, group: int, rotated: bool = False) -> RoundedWeight:
    """Round weights to the nearest level · scale; 16 MiB of fp32 copies at a time.

    `group` 0 is int8 with one scale for each output; else it is int4 with one scale, rounded to
    fp16 first, for each `group` inputs; the last group may be smaller. An int4 scale has the sign
    that makes the largest number level -8: [0.8 -0.3 0.76 0] has the scale -0.1 and the levels [-8
    3 -8 0]. With `rotated` the weight is rotated first, which makes its largest numbers smaller
    too.
    """
    rows = max(1, MAX_ROUNDED_NUMBERS // weight_OH.shape[1])
    size = rotation_of(weight_OH.shape[1])
    pieces = weight_OH.detach().split(rows)
    rotated_pieces = (rotate(part) / size for part in pieces) if rotated else pieces
    parts = [round_outputs(part, group) for part in rotated_pieces]
    levels, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return RoundedWeight(levels, scales, group, rotated=rotated)


def round_weight_by_power(weight_OH: Tensor, group: int, power_H: Tensor) -> RoundedWeight:
    """Round to int4 with the least error of outputs, for inputs with mean squares `power_H`.

    Scales of SCALE_FACTORS times that of `round_weight` are tried for each group, and the one with
    the least sum of power · error² is chosen (the search of llama.cpp's k-quants, with its
    importance matrix).
    """
    inputs = weight_OH.shape[1]
    floor = power_H.mean() * MIN_POWER_SHARE
    power_GI = functional.pad(power_H.clamp_min(floor), (0, -inputs % group)).unflatten(
        0, (-1, group)
    )
    rows = max(1, MAX_ROUNDED_NUMBERS // inputs)
    parts = [round_outputs_by_power(part, power_GI) for part in weight_OH.detach().split(rows)]
    levels, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return RoundedWeight(levels[:, :inputs].contiguous(), scales, group)


def round_outputs_by_power(weight_OH: Tensor, power_GI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (levels, scales) of some outputs."""
    group = power_GI.shape[1]
    least, most = LEVELS["int4"]
    weight = functional.pad(weight_OH.float(), (0, -weight_OH.shape[1] % group))
    weight = weight.unflatten(1, (-1, group))
    largest = extremes(weight)
    loss = torch.full_like(largest, float("inf"))
    scales, levels = torch.zeros_like(largest), torch.zeros_like(weight)
    for factor in SCALE_FACTORS:
        scale = (largest * (factor / least)).half().float()
        tried = (weight / scale[..., None]).nan_to_num_(0, 0, 0).round_().clamp_(least, most)
        error = ((tried * scale[..., None]).sub_(weight).square_() * power_GI).sum(-1)
        better = error < loss
        loss = torch.where(better, error, loss)
        scales = torch.where(better, scale, scales)
        levels = torch.where(better[..., None], tried, levels)
    return levels.to(torch.int8).flatten(1), scales


def rotation_of(inputs: int) -> int:
    """Return the inputs of one rotation: the largest power of two up to 64 that divides `inputs`.

    >>> rotation_of(896), rotation_of(172), rotation_of(33)
    (64, 4, 1)
    """
    return gcd(inputs, MAX_ROTATION)


def rotate(x_TH: Tensor) -> Tensor:
    """Multiply x by the Hadamard matrix of ±1, in blocks of `rotation_of` inputs, in fp32.

    An outlier is spread evenly over its block, so that a common scale loses little (QuaRot,
    Ashkboos et al. 2024). The matrix times itself is its size times the identity: products of
    rotated rows with rotated weights, divided by the size, are those of plain ones. The fast
    Walsh-Hadamard transform has butterflies of distance 1, 2, 4 … in this order, which fixes the
    bits.
    """
    x, size = x_TH.float(), rotation_of(x_TH.shape[-1])
    distance = 1
    while distance < size:
        one, other = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((one + other, one - other), -2).flatten(-3)
        distance *= 2
    return x


def round_weight_fp8(weight_OH: Tensor) -> RoundedWeight:
    """Round weights to number · scale with numbers of type e4m3 and a scale for each output.

    Each output is rounded as `round_rows_fp8` rounds a row; 16 MiB of fp32 copies at a time.
    """
    rows = max(1, MAX_ROUNDED_NUMBERS // weight_OH.shape[1])
    parts = [round_rows_fp8(part) for part in weight_OH.detach().split(rows)]
    numbers, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return RoundedWeight(numbers, scales[:, None], 0)


def round_fp8(weight: RoundedWeight, rotated: bool) -> RoundedWeight:
    """Round a matrix in FP8 to int8 by output; 16 MiB of fp32 copies at a time."""
    rows = max(1, MAX_ROUNDED_NUMBERS // weight.levels_OH.shape[1])
    pieces = zip(weight.levels_OH.split(rows), weight.scales_OG.split(rows), strict=True)
    plain = (RoundedWeight(levels, scales, weight.group).plain() for levels, scales in pieces)
    return RoundedWeight.joined([round_weight(part, 0, rotated) for part in plain])


def round_outputs(weight_OH: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (levels, scales) of some outputs."""
    inputs = weight_OH.shape[1]
    size, (least, most) = (group, LEVELS["int4"]) if group else (inputs, LEVELS["int8"])
    weight = functional.pad(weight_OH.float(), (0, -inputs % size)).unflatten(1, (-1, size))
    scale = extremes(weight) / least if group else weight.abs().amax(-1) / most
    if group:
        scale = scale.half().float()
    levels = (weight / scale[..., None]).nan_to_num(0, 0, 0).round().clamp(least, most)
    return levels.to(torch.int8).flatten(1)[:, :inputs].contiguous(), scale


def extremes(weight_OGI: Tensor) -> Tensor:
    """Return the number of largest magnitude of each group, (O, G); in a tie the negative one."""
    least, most = weight_OGI.aminmax(dim=-1)
    size = weight_OGI.abs().amax(-1)
    return torch.where(most > -least, size, -size)


def round_rows(x_TH: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Return (levels (T, H) in int8, fp32 scales (T, B)): x = level · scale, ties to even.

    `block` 0: one block for each row; the last block may be shorter. [0.5 -2.54 0] has the
    scale 0.02 and the levels [25 -127 0]. A block of zeros has the scale 0; one with a number that
    is not finite has the scale NaN, so that its products show it.
    """
    inputs = x_TH.shape[-1]
    size = block or max(1, inputs)
    x = functional.pad(x_TH.float(), (0, -inputs % size)).unflatten(-1, (-1, size))
    most_TB = x.abs().amax(-1)
    counts_TB = most_TB.isfinite() & (most_TB > SMALLEST_BLOCK)
    # 127 / most_TB is torch's reciprocal, rounded twice
    inverse_TB = torch.where(counts_TB, torch.full_like(most_TB, 127) / most_TB, 0)
    levels = (x * inverse_TB[..., None]).nan_to_num(0, 0, 0).round()
    scales_TB = torch.where(counts_TB, most_TB / 127, 0)
    scales_TB = torch.where(most_TB.isfinite(), scales_TB, float("nan"))
    return levels.to(torch.int8).flatten(-2)[..., :inputs], scales_TB


def dequantized_rows(x_TH: Tensor, format: Format) -> Tensor:
    """Return the inputs (T, H) in fp32 as a product with weights of `format` rounds them."""
    levels_TH, scales_TB = round_rows(rotate(x_TH) if format.rotated else x_TH, format.block)
    inputs = x_TH.shape[-1]
    rounded_TH = levels_TH.float() * scales_TB.repeat_interleave(format.block, -1)[..., :inputs]
    return rotate(rounded_TH) / rotation_of(inputs) if format.rotated else rounded_TH


def round_rows_fp8(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers (T, H) of type e4m3, fp32 scales (T)): x = number · scale, nearest.

    The largest number of a row becomes 448, e4m3's largest: [896 1 0] has the scale 2 and the
    numbers [448 0.5 0]. Rows of zeros, and those that are not finite, are as in `round_rows`.
    """
    x = x_TH.float()
    most_T = x.abs().amax(-1)
    counts_T = most_T.isfinite() & (most_T > SMALLEST_BLOCK)
    inverse_T = torch.where(counts_T, torch.full_like(most_T, MAX_FP8) / most_T, 0)
    numbers = (x * inverse_T[:, None]).nan_to_num(0, 0, 0).clamp(-MAX_FP8, MAX_FP8)
    scales_T = torch.where(counts_T, most_T / MAX_FP8, 0)
    scales_T = torch.where(most_T.isfinite(), scales_T, float("nan"))
    return numbers.to(torch.float8_e4m3fn), scales_T


def fused(first: Tensor, second: Tensor, added: Tensor) -> Tensor:
    """Return first · second + added in fp32, rounded once, as a fused multiply-add.

    The product of two fp32 numbers is exact in fp64. A sum that fp64 rounded to the middle between
    two fp32 numbers is moved back to its exact side.
    """
    product, start = first.double() * second.double(), added.double()
    total = product + start
    middle = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    if bool(middle.any()):
        added_part = total - start
        lost = (start - (total - added_part)) + (product - added_part)
        neighbor = total.nextafter(lost.sign() * float("inf"))
        total = torch.where(middle & (lost != 0), neighbor, total)
    return total.float()
