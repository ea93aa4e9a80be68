"""compressed-tensors: pack-quantized (int32 words along the inputs), int- and float-quantized.

Codes are levels + 2^(bits-1); weight = (level - zero) · scale. Scales may have either sign.
"""

from torch import Tensor

from headway.runtime.quantized.fp8 import read_float_levels, read_float_params
from headway.runtime.quantized.matrix import (
    FLOAT_TYPES,
    SAME_MODEL,
    Layout,
    QuantParams,
    StoredMatrix,
    codes_along_inputs,
    group_size,
    kernel_group,
    num_words,
    read_order,
    read_scales,
    repeat_groups,
    signed_levels,
)
from headway.spec.formats import Kind


def read_packed_shape(matrix: StoredMatrix) -> tuple[int, int]:
    """Return (outputs, inputs) of `weight_shape`, checked against the packed words."""
    matrix.expect("weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = matrix.tensor("weight_shape").tolist()
    matrix.expect("weight_packed", ("I32",), (outputs, num_words(inputs, matrix.scheme.bits)))
    return matrix.expect_matrix("weight_packed", ("I32",))[0], inputs


def read_packed_params(matrix: StoredMatrix) -> QuantParams:
    """Return the parameters of pack-quantized."""
    shape = read_packed_shape(matrix)
    return read_integer_params(matrix, shape, 4 if matrix.scheme.bits == 4 else 8)


def read_packed_levels(matrix: StoredMatrix) -> Tensor:
    """Return the codes minus 8 or 128."""
    bits = matrix.scheme.bits
    inputs = int(matrix.tensor("weight_shape")[1])
    codes = codes_along_inputs(matrix.tensor("weight_packed"), bits)[:, :inputs]
    return signed_levels(codes, bits)


def read_byte_params(matrix: StoredMatrix) -> QuantParams:
    """Return the parameters of int-quantized."""
    return read_integer_params(matrix, matrix.expect_matrix("weight", ("I8",)), 8)


def read_byte_levels(matrix: StoredMatrix) -> Tensor:
    """Return the levels, which are stored as they are."""
    return matrix.tensor("weight")


def read_integer_params(matrix: StoredMatrix, shape: tuple[int, int], bits: int) -> QuantParams:
    """Return scales, zeros and input order of integer levels."""
    outputs, inputs = shape
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect_scales("weight_scale", FLOAT_TYPES, outputs, groups)
    scales = read_scales(matrix, "weight_scale", signed=True).reshape(-1, groups)
    scales = scales.expand(outputs, groups)
    offsets = None
    if "weight_zero_point" in matrix.tensors:
        zeros = read_zeros(matrix, outputs, groups)
        offsets = -zeros * scales if bool(zeros.any()) else None
    elif not matrix.scheme.symmetric:
        matrix.fail(
            "weight_zero_point", "is missing, and the config says symmetric: false", SAME_MODEL
        )
    order = None
    if "weight_g_idx" in matrix.tensors:
        order = read_order(matrix, "weight_g_idx", inputs, group)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    scales = repeat_groups(scales, group, size, inputs)
    if offsets is not None:
        offsets = repeat_groups(offsets, group, size, inputs)
    return QuantParams(kind, shape, size, scales, offsets, order)


def read_zeros(matrix: StoredMatrix, outputs: int, groups: int) -> Tensor:
    """Return the zeros (O, G) in fp32, stored as bytes or packed into words along the outputs."""
    bits, entry = matrix.scheme.bits, matrix.tensors["weight_zero_point"]
    if entry.dtype == "I32" and matrix.scheme.layout == "pack-quantized":
        matrix.expect("weight_zero_point", ("I32",), (num_words(outputs, bits), groups))
        words = matrix.tensor("weight_zero_point").T
        codes = codes_along_inputs(words, bits)[:, :outputs].T
        return codes.float() - (1 << (bits - 1))
    matrix.expect_scales("weight_zero_point", ("I8",), outputs, groups)
    zeros = matrix.tensor("weight_zero_point").float().reshape(-1, groups)
    return zeros.expand(outputs, groups)


PACKED = Layout(
    needed=("weight_packed", "weight_scale", "weight_shape"),
    optional=("weight_zero_point", "weight_g_idx"),
    params=read_packed_params,
    levels=read_packed_levels,
    scale="weight_scale",
)
BYTES = Layout(
    needed=("weight", "weight_scale"),
    optional=("weight_zero_point",),
    params=read_byte_params,
    levels=read_byte_levels,
    scale="weight_scale",
)
FLOAT = Layout(
    needed=("weight", "weight_scale"),
    optional=(),
    params=lambda matrix: read_float_params(matrix, "weight_scale"),
    levels=read_float_levels,
    scale="weight_scale",
)
