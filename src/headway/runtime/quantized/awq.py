"""AWQ in the packing of AutoAWQ's GEMM: int32 words along the outputs, eight codes in another
order.

A word holds the outputs 0 2 4 6 1 3 5 7 of its eight, lowest bits first. weight = scale · (code -
zero); zeros are packed likewise.
"""

from torch import Tensor

from headway.runtime.quantized.matrix import (
    FLOAT_TYPES,
    SAME_MODEL,
    Layout,
    QuantParams,
    StoredMatrix,
    codes_along_inputs,
    group_size,
    kernel_group,
    read_scales,
    repeat_groups,
    signed_levels,
)

CODE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output of a word's eight → the place of its code."""
MIDDLE = 8


def unpack_codes(words: Tensor) -> Tensor:
    """Return the codes (N, O) of words (N, O / 8), in the order of the outputs."""
    codes = codes_along_inputs(words, 4)
    return codes.unflatten(1, (-1, 8))[..., list(CODE_ORDER)].flatten(1)


def read_params(matrix: StoredMatrix) -> QuantParams:
    """Return scales and zeros."""
    inputs, words = matrix.expect_matrix("qweight", ("I32",))
    outputs = 8 * words
    group = group_size(matrix, inputs)
    groups = inputs // group
    matrix.expect("scales", FLOAT_TYPES, (groups, outputs))
    size = kernel_group("int4", group, inputs)
    scales = read_scales(matrix, "scales").T
    offsets = None
    if "qzeros" in matrix.tensors:
        matrix.expect("qzeros", ("I32",), (groups, words))
        zeros = unpack_codes(matrix.tensor("qzeros")).T.float()
        if bool((zeros != MIDDLE).any()):
            offsets = repeat_groups((MIDDLE - zeros) * scales, group, size, inputs)
    elif not matrix.scheme.symmetric:
        matrix.fail("qzeros", "is missing, and the config says zero_point: true", SAME_MODEL)
    scales = repeat_groups(scales, group, size, inputs)
    return QuantParams("int4", (outputs, inputs), size, scales, offsets)


def read_levels(matrix: StoredMatrix) -> Tensor:
    """Return the codes minus 8."""
    return signed_levels(unpack_codes(matrix.tensor("qweight")).T.contiguous(), 4)


AWQ = Layout(
    needed=("qweight", "scales"),
    optional=("qzeros",),
    params=read_params,
    levels=read_levels,
    scale="scales",
)
