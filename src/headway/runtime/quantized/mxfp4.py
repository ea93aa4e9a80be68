"""MXFP4: e2m1 numbers, two per byte, lower half first, and a power of two for each 32.

compressed-tensors packs a matrix as (O, H / 2); gpt-oss has 16 bytes for each 32: (O, H / 32, 16).

Doubled e2m1 numbers are integers of -12 … 12, so the matrix is exactly int8 in groups of 32.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.fp8 import EXPONENT_TYPES, read_exponent_scales
from headway.runtime.quantized.matrix import (
    SAME_MODEL,
    Layout,
    QuantParams,
    StoredMatrix,
    group_size,
    split_nibbles,
)

GROUP = 32
DOUBLED_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Code of e2m1 → twice its number."""


def read_params(matrix: StoredMatrix) -> QuantParams:
    """Return half the scales, because the levels are doubled."""
    outputs, pairs = matrix.expect_matrix("weight_packed", ("U8",))
    inputs = 2 * pairs
    matrix.expect("weight_scale", EXPONENT_TYPES, (outputs, inputs // group_size(matrix, inputs)))
    return QuantParams(
        "int8", (outputs, inputs), GROUP, read_exponent_scales(matrix, "weight_scale") / 2
    )


def read_levels(matrix: StoredMatrix) -> Tensor:
    """Return the doubled numbers."""
    return double_levels(matrix.tensor("weight_packed"))


def double_levels(packed: Tensor) -> Tensor:
    """Return the doubled numbers of bytes (O, H / 2)."""
    return torch.tensor(DOUBLED_VALUES, dtype=torch.int8)[split_nibbles(packed).int()]


def read_block_params(matrix: StoredMatrix) -> QuantParams:
    """Return the parameters of gpt-oss's tensors."""
    shape = matrix.tensors["scales"].shape
    if len(shape) != 2 or not all(shape):
        matrix.fail("scales", f"has shape {list(shape)}, which is not that of a matrix", SAME_MODEL)
    matrix.expect("scales", EXPONENT_TYPES, shape)
    matrix.expect("blocks", ("U8",), (*shape, GROUP // 2))
    return QuantParams(
        "int8", (shape[0], GROUP * shape[1]), GROUP, read_exponent_scales(matrix, "scales") / 2
    )


MXFP4 = Layout(
    needed=("weight_packed", "weight_scale"),
    optional=(),
    params=read_params,
    levels=read_levels,
    scale="weight_scale",
)
BLOCKS = Layout(
    needed=("blocks", "scales"),
    optional=(),
    params=read_block_params,
    levels=lambda matrix: double_levels(matrix.tensor("blocks").flatten(1)),
    scale="scales",
)
