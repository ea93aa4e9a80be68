"""compressed-tensors: pack-quantized (int32 words along the inputs), int- and float-quantized.

Codes are levels + 2^(bits-1); weight = (level - zero) · scale. Scales may be of either sign.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.fp8 import float_levels, float_numbers
from headway.runtime.quantized.parts import (
    SAME_MODEL,
    Layout,
    Numbers,
    Part,
    by_group,
    codes_along_inputs,
    group_size,
    kernel_group,
    order_of,
    scales_of,
    words_for,
)
from headway.spec.formats import Kind

FLOATS = ("F16", "BF16", "F32")


def packed_shape(part: Part) -> tuple[int, int]:
    """(outputs, inputs) as `weight_shape` has them, checked with the packed words."""
    part.expect("weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = part.tensor("weight_shape").tolist()
    part.expect("weight_packed", ("I32",), (outputs, words_for(inputs, part.scheme.bits)))
    return part.expect_matrix("weight_packed", ("I32",))[0], inputs


def packed_numbers(part: Part) -> Numbers:
    """Of pack-quantized."""
    shape = packed_shape(part)
    return integer_numbers(part, shape, 4 if part.scheme.bits == 4 else 8)


def packed_levels(part: Part) -> Tensor:
    """Codes less 8 or 128."""
    bits = part.scheme.bits
    inputs = int(part.tensor("weight_shape")[1])
    codes = codes_along_inputs(part.tensor("weight_packed"), bits)[:, :inputs]
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def byte_numbers(part: Part) -> Numbers:
    """Of int-quantized."""
    return integer_numbers(part, part.expect_matrix("weight", ("I8",)), 8)


def byte_levels(part: Part) -> Tensor:
    """The bytes themselves."""
    return part.tensor("weight")


def integer_numbers(part: Part, shape: tuple[int, int], bits: int) -> Numbers:
    """Scales, zeros and order of integer levels."""
    outputs, inputs = shape
    group = group_size(part, inputs)
    groups = inputs // group
    part.expect_scales("weight_scale", FLOATS, outputs, groups)
    scales = scales_of(part, "weight_scale", signed=True).reshape(-1, groups)
    scales = scales.expand(outputs, groups)
    offsets = None
    if "weight_zero_point" in part.tensors:
        zeros = zeros_of(part, outputs, groups)
        offsets = -zeros * scales if bool(zeros.any()) else None
    elif not part.scheme.symmetric:
        part.fail(
            "weight_zero_point", "is missing, and the config says symmetric: false", SAME_MODEL
        )
    order = None
    if "weight_g_idx" in part.tensors:
        order = order_of(part, "weight_g_idx", inputs, group)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    scales = by_group(scales, group, size, inputs)
    if offsets is not None:
        offsets = by_group(offsets, group, size, inputs)
    return Numbers(kind, shape, size, scales, offsets, order)


def zeros_of(part: Part, outputs: int, groups: int) -> Tensor:
    """The zeros (O, G) in fp32: bytes, or packed into words along the outputs."""
    bits, entry = part.scheme.bits, part.tensors["weight_zero_point"]
    if entry.dtype == "I32" and part.scheme.layout == "pack-quantized":
        part.expect("weight_zero_point", ("I32",), (words_for(outputs, bits), groups))
        words = part.tensor("weight_zero_point").T
        codes = codes_along_inputs(words, bits)[:, :outputs].T
        return codes.float() - (1 << (bits - 1))
    part.expect_scales("weight_zero_point", ("I8",), outputs, groups)
    zeros = part.tensor("weight_zero_point").float().reshape(-1, groups)
    return zeros.expand(outputs, groups)


PACKED = Layout(
    needed=("weight_packed", "weight_scale", "weight_shape"),
    optional=("weight_zero_point", "weight_g_idx"),
    numbers=packed_numbers,
    levels=packed_levels,
    scale="weight_scale",
)
BYTES = Layout(
    needed=("weight", "weight_scale"),
    optional=("weight_zero_point",),
    numbers=byte_numbers,
    levels=byte_levels,
    scale="weight_scale",
)
FLOAT = Layout(
    needed=("weight", "weight_scale"),
    optional=(),
    numbers=lambda part: float_numbers(part, "weight_scale"),
    levels=float_levels,
    scale="weight_scale",
)
