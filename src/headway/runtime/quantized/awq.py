"""AWQ as AutoAWQ's GEMM packs it: int32 words along the outputs, eight at a time in another order.

A word holds the outputs 0 2 4 6 1 3 5 7 of its eight, lowest bits first. weight = scale · (code -
zero), zeros packed alike.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.matrix import (
    SAME_MODEL,
    CheckpointMatrix,
    Layout,
    QuantParams,
    by_group,
    codes_along_inputs,
    group_size,
    kernel_group,
    scales_of,
)

CODE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output of a word's eight → where its code stands."""
MIDDLE = 8


def unpack_codes(words: Tensor) -> Tensor:
    """Words (N, O / 8) → codes (N, O) in the order of the outputs."""
    codes = codes_along_inputs(words, 4)
    return codes.unflatten(1, (-1, 8))[..., list(CODE_ORDER)].flatten(1)


def params_of(matrix: CheckpointMatrix) -> QuantParams:
    """Scales and zeros."""
    inputs, words = matrix.expect_matrix("qweight", ("I32",))
    outputs = 8 * words
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect("scales", ("F16", "BF16", "F32"), (groups, outputs))
    size = kernel_group("int4", group, inputs)
    scales = scales_of(matrix, "scales").T
    offsets = None
    if "qzeros" in matrix.tensors:
        matrix.expect("qzeros", ("I32",), (groups, words))
        zeros = unpack_codes(matrix.tensor("qzeros")).T.float()
        if bool((zeros != MIDDLE).any()):
            offsets = by_group((MIDDLE - zeros) * scales, group, size, inputs)
    elif not matrix.scheme.symmetric:
        matrix.fail("qzeros", "is missing, and the config says zero_point: true", SAME_MODEL)
    scales = by_group(scales, group, size, inputs)
    return QuantParams("int4", (outputs, inputs), size, scales, offsets)


def levels_of(matrix: CheckpointMatrix) -> Tensor:
    """Codes less 8."""
    return unpack_codes(matrix.tensor("qweight")).T.contiguous().view(torch.int8) - MIDDLE


AWQ = Layout(
    needed=("qweight", "scales"),
    optional=("qzeros",),
    params=params_of,
    levels=levels_of,
    scale="scales",
)
