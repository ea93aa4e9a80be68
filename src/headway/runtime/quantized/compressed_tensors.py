"""compressed-tensors: pack-quantized (int32 words along the inputs), int- and float-quantized.

Codes are levels + 2^(bits-1); weight = (level - zero) · scale. Scales may have either sign.
"""

from torch import Tensor

from headway.runtime.quantized.fp8 import float_levels, float_params
from headway.runtime.quantized.matrix import (
    FLOAT_TYPES,
    SAME_MODEL,
    Layout,
    QuantParams,
    StoredMatrix,
    by_group,
    codes_along_inputs,
    group_size,
    kernel_group,
    order_of,
    scales_of,
    signed_levels,
    words_for,
)
from headway.spec.formats import Kind


def packed_shape(matrix: StoredMatrix) -> tuple[int, int]:
    """Return (outputs, inputs) of `weight_shape`, checked against the packed words."""
    matrix.expect("weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = matrix.tensor("weight_shape").tolist()
    matrix.expect("weight_packed", ("I32",), (outputs, words_for(inputs, matrix.scheme.bits)))
    return matrix.expect_matrix("weight_packed", ("I32",))[0], inputs


def packed_params(matrix: StoredMatrix) -> QuantParams:
    """Return the parameters of pack-quantized."""
    shape = packed_shape(matrix)
    return integer_params(matrix, shape, 4 if matrix.scheme.bits == 4 else 8)


def packed_levels(matrix: StoredMatrix) -> Tensor:
    """Return the codes minus 8 or 128."""
    bits = matrix.scheme.bits
    inputs = int(matrix.tensor("weight_shape")[1])
    codes = codes_along_inputs(matrix.tensor("weight_packed"), bits)[:, :inputs]
    return signed_levels(codes, bits)


def byte_params(matrix: StoredMatrix) -> QuantParams:
    """Return the parameters of int-quantized."""
    return integer_params(matrix, matrix.expect_matrix("weight", ("I8",)), 8)


def byte_levels(matrix: StoredMatrix) -> Tensor:
    """Return the levels, which are stored as they are."""
    return matrix.tensor("weight")


def integer_params(matrix: StoredMatrix, shape: tuple[int, int], bits: int) -> QuantParams:
    """Return scales, zeros and input order of integer levels."""
    outputs, inputs = shape
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect_scales("weight_scale", FLOAT_TYPES, outputs, groups)
    scales = scales_of(matrix, "weight_scale", signed=True).reshape(-1, groups)
    scales = scales.expand(outputs, groups)
    offsets = None
    if "weight_zero_point" in matrix.tensors:
        zeros = zeros_of(matrix, outputs, groups)
        offsets = -zeros * scales if bool(zeros.any()) else None
    elif not matrix.scheme.symmetric:
        matrix.fail(
            "weight_zero_point", "is missing, and the config says symmetric: false", SAME_MODEL
        )
    order = None
    if "weight_g_idx" in matrix.tensors:
        order = order_of(matrix, "weight_g_idx", inputs, group)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    scales = by_group(scales, group, size, inputs)
    if offsets is not None:
        offsets = by_group(offsets, group, size, inputs)
    return QuantParams(kind, shape, size, scales, offsets, order)


def zeros_of(matrix: StoredMatrix, outputs: int, groups: int) -> Tensor:
    """Return the zeros (O, G) in fp32, stored as bytes or packed into words along the outputs."""
    bits, entry = matrix.scheme.bits, matrix.tensors["weight_zero_point"]
    if entry.dtype == "I32" and matrix.scheme.layout == "pack-quantized":
        matrix.expect("weight_zero_point", ("I32",), (words_for(outputs, bits), groups))
        words = matrix.tensor("weight_zero_point").T
        codes = codes_along_inputs(words, bits)[:, :outputs].T
        return codes.float() - (1 << (bits - 1))
    matrix.expect_scales("weight_zero_point", ("I8",), outputs, groups)
    zeros = matrix.tensor("weight_zero_point").float().reshape(-1, groups)
    return zeros.expand(outputs, groups)


PACKED = Layout(
    needed=("weight_packed", "weight_scale", "weight_shape"),
    optional=("weight_zero_point", "weight_g_idx"),
    params=packed_params,
    levels=packed_levels,
    scale="weight_scale",
)
BYTES = Layout(
    needed=("weight", "weight_scale"),
    optional=("weight_zero_point",),
    params=byte_params,
    levels=byte_levels,
    scale="weight_scale",
)
FLOAT = Layout(
    needed=("weight", "weight_scale"),
    optional=(),
    params=lambda matrix: float_params(matrix, "weight_scale"),
    levels=float_levels,
    scale="weight_scale",
)
