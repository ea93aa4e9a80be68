"""GPTQ: int32 words along the inputs, zeros packed along the outputs, inputs perhaps reordered.

weight = scale · (code - zero). Version 1 stores zero - 1, version 2 the zero itself, and the config
is not always right about it: the numbers decide (`find_shift`).
"""

import logging

import torch
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.quantized.matrix import (
    QUANTIZE_AGAIN,
    CheckpointMatrix,
    Layout,
    QuantParams,
    by_group,
    codes_along_inputs,
    group_size,
    kernel_group,
    order_of,
    scales_of,
    words_for,
)
from headway.spec.formats import Kind

log = logging.getLogger(__name__)

SAMPLED_MATRICES = 8
"""Matrices whose codes are looked at; their mean is known to a hundredth of a level then."""
MIN_CERTAINTY = 0.3
"""A mean as far from the middle between both versions decides against the config: chosen."""


def matrix_shape(matrix: CheckpointMatrix) -> tuple[int, int]:
    """(outputs, inputs), from the scales and g_idx, checked with the packed words."""
    bits = matrix.scheme.bits
    words, outputs = matrix.expect_matrix("qweight", ("I32",))
    inputs = words * 32 // bits
    if "g_idx" in matrix.tensors and matrix.tensors["g_idx"].shape != (inputs,):
        index = matrix.tensors["g_idx"].shape
        fits = len(index) == 1 and words_for(index[0], bits) == words
        inputs = index[0] if fits else inputs
    return outputs, inputs


def stored_zeros(matrix: CheckpointMatrix, outputs: int, groups: int) -> Tensor:
    """The zeros (G, O) as bytes, as they are stored."""
    bits = matrix.scheme.bits
    matrix.expect("qzeros", ("I32",), (groups, words_for(outputs, bits)))
    return codes_along_inputs(matrix.tensor("qzeros"), bits)[:, :outputs]


def params_of(matrix: CheckpointMatrix) -> QuantParams:
    """Scales, zeros and order."""
    bits = matrix.scheme.bits
    shape = outputs, inputs = matrix_shape(matrix)
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect("scales", ("F16", "BF16", "F32"), (groups, outputs))
    scales = scales_of(matrix, "scales").T
    middle = 1 << (bits - 1)
    zeros = (stored_zeros(matrix, outputs, groups).T.long() + matrix.shift) & (2 * middle - 1)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    offsets = None
    if bool((zeros != middle).any()):
        offsets = by_group((middle - zeros).float() * scales, group, size, inputs)
    order = order_of(matrix, "g_idx", inputs, group) if "g_idx" in matrix.tensors else None
    return QuantParams(kind, shape, size, by_group(scales, group, size, inputs), offsets, order)


def levels_of(matrix: CheckpointMatrix) -> Tensor:
    """Codes less 8 or 128."""
    bits = matrix.scheme.bits
    _, inputs = matrix_shape(matrix)
    codes = codes_along_inputs(matrix.tensor("qweight").T, bits)[:, :inputs]
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def find_shift(matrices: list[CheckpointMatrix], version: str) -> int:
    """1 where the zeros are stored less one, as version 1 does, else 0.

    Zeros of 7 throughout are version 1's of a symmetric matrix, of 8 version 2's. Others: codes
    less zeros have a mean of about 0 over a matrix, so that less one shows as a mean of 1.
    """
    stated_shift = 0 if version == "gptq_v2" else 1
    shifts = {each for matrix in matrices for each in uniform_zeros(matrix)}
    if len(shifts) == 1 and shifts <= {-1, 0}:
        shift = -shifts.pop()
    elif shifts and shifts <= {-1, 0}:
        raise CheckpointError(
            "Some qzeros of the checkpoint are of GPTQ's version 1, some of version 2.",
            QUANTIZE_AGAIN,
        )
    else:
        means = [
            mean_level(matrix)
            for matrix in matrices[:: max(1, len(matrices) // SAMPLED_MATRICES)][:SAMPLED_MATRICES]
        ]
        mean = sum(means) / len(means)
        shift = stated_shift if abs(mean - 0.5) < 0.5 - MIN_CERTAINTY else int(mean > 0.5)
    if shift != stated_shift:
        log.warning(
            "the zeros of the checkpoint are GPTQ's version %d, though its config says %s",
            2 - shift,
            version,
        )
    return shift


def uniform_zeros(matrix: CheckpointMatrix) -> set[int]:
    """What the stored zeros are beside the middle, -1 and 0 for 7 and 8 of four bits; 2: others."""
    matrix.expect_matrix("qzeros", ("I32",))
    bits, (_, outputs) = matrix.scheme.bits, matrix.expect_matrix("qweight", ("I32",))
    stored = codes_along_inputs(matrix.tensor("qzeros"), bits)[:, :outputs]
    least, most = int(stored.min()), int(stored.max())
    middle = 1 << (bits - 1)
    return {least - middle} if least == most and least - middle in (-1, 0) else {2}


def mean_level(matrix: CheckpointMatrix) -> float:
    """The mean of code less stored zero."""
    outputs, inputs = matrix_shape(matrix)
    groups = inputs // group_size(matrix, inputs)
    stored = stored_zeros(matrix, outputs, groups).float().mean()
    codes = codes_along_inputs(matrix.tensor("qweight"), matrix.scheme.bits)
    return float(codes.float().mean() - stored)


GPTQ = Layout(
    needed=("qweight", "qzeros", "scales"),
    optional=("g_idx",),
    params=params_of,
    levels=levels_of,
    scale="scales",
)
