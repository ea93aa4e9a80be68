"""GPTQ: int32 words along the inputs, zeros packed along the outputs, inputs perhaps reordered.

weight = scale · (code - zero). Version 1 stores zero - 1, version 2 the zero itself. The config may
state the wrong version, so the numbers decide (`find_shift`).
"""

import logging

from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.quantized.matrix import (
    FLOAT_TYPES,
    QUANTIZE_AGAIN,
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

log = logging.getLogger(__name__)

SAMPLED_MATRICES = 8
"""Matrices whose codes are examined; their mean is then known to a hundredth of a level."""
MIN_CERTAINTY = 0.3
"""Distance of the mean from the middle between both versions that overrules the config; chosen."""


def read_shape(matrix: StoredMatrix) -> tuple[int, int]:
    """Return (outputs, inputs), from the scales and g_idx, checked against the packed words."""
    bits = matrix.scheme.bits
    words, outputs = matrix.expect_matrix("qweight", ("I32",))
    inputs = words * 32 // bits
    if "g_idx" in matrix.tensors and matrix.tensors["g_idx"].shape != (inputs,):
        index = matrix.tensors["g_idx"].shape
        fits = len(index) == 1 and num_words(index[0], bits) == words
        inputs = index[0] if fits else inputs
    return outputs, inputs


def read_stored_zeros(matrix: StoredMatrix, outputs: int, groups: int) -> Tensor:
    """Return the zeros (G, O) as bytes, as they are stored."""
    bits = matrix.scheme.bits
    matrix.expect("qzeros", ("I32",), (groups, num_words(outputs, bits)))
    return codes_along_inputs(matrix.tensor("qzeros"), bits)[:, :outputs]


def read_params(matrix: StoredMatrix) -> QuantParams:
    """Return scales, zeros and input order."""
    bits = matrix.scheme.bits
    shape = outputs, inputs = read_shape(matrix)
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect("scales", FLOAT_TYPES, (groups, outputs))
    scales = read_scales(matrix, "scales").T
    middle = 1 << (bits - 1)
    zeros = (read_stored_zeros(matrix, outputs, groups).T.long() + matrix.shift) & (2 * middle - 1)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    offsets = None
    if bool((zeros != middle).any()):
        offsets = repeat_groups((middle - zeros).float() * scales, group, size, inputs)
    order = read_order(matrix, "g_idx", inputs, group) if "g_idx" in matrix.tensors else None
    return QuantParams(
        kind, shape, size, repeat_groups(scales, group, size, inputs), offsets, order
    )


def read_levels(matrix: StoredMatrix) -> Tensor:
    """Return the codes minus 8 or 128."""
    bits = matrix.scheme.bits
    _, inputs = read_shape(matrix)
    codes = codes_along_inputs(matrix.tensor("qweight").T, bits)[:, :inputs]
    return signed_levels(codes, bits)


def find_shift(matrices: list[StoredMatrix], version: str) -> int:
    """Return 1 where the zeros are stored minus one, as in version 1, else 0.

    In a symmetric matrix all zeros are 7 in version 1 and 8 in version 2. In others, codes minus
    zeros have a mean of about 0 over a matrix, so zeros that are stored minus one give a mean of 1.
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


def uniform_zeros(matrix: StoredMatrix) -> set[int]:
    """Return {-1} or {0} for zeros that are all 7 or 8 (of four bits), {2} for others."""
    matrix.expect_matrix("qzeros", ("I32",))
    bits, (_, outputs) = matrix.scheme.bits, matrix.expect_matrix("qweight", ("I32",))
    stored = codes_along_inputs(matrix.tensor("qzeros"), bits)[:, :outputs]
    least, most = int(stored.min()), int(stored.max())
    middle = 1 << (bits - 1)
    return {least - middle} if least == most and least - middle in (-1, 0) else {2}


def mean_level(matrix: StoredMatrix) -> float:
    """Return the mean of code minus stored zero."""
    outputs, inputs = read_shape(matrix)
    groups = inputs // group_size(matrix, inputs)
    stored = read_stored_zeros(matrix, outputs, groups).float().mean()
    codes = codes_along_inputs(matrix.tensor("qweight"), matrix.scheme.bits)
    return float(codes.float().mean() - stored)


GPTQ = Layout(
    needed=("qweight", "qzeros", "scales"),
    optional=("g_idx",),
    params=read_params,
    levels=read_levels,
    scale="scales",
)
