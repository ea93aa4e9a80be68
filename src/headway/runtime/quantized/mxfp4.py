"""MXFP4: e2m1 numbers, two a byte, lower half first, and a power of two for each 32.

compressed-tensors packs a matrix (O, H / 2), gpt-oss has 16 bytes for each 32: (O, H / 32, 16).

Twice an e2m1 number is a whole one of -12 … 12, so that the matrix is int8 by 32, exactly.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.fp8 import EXPONENTS, powers
from headway.runtime.quantized.parts import (
    SAME_MODEL,
    Layout,
    Numbers,
    Part,
    group_size,
    nibbles,
)

GROUP = 32
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Code → twice its number."""


def numbers_of(part: Part) -> Numbers:
    """Half the scales, for levels are twice the numbers."""
    outputs, pairs = part.expect_matrix("weight_packed", ("U8",))
    inputs = 2 * pairs
    part.expect("weight_scale", EXPONENTS, (outputs, inputs // group_size(part, inputs)))
    return Numbers("int8", (outputs, inputs), GROUP, powers(part, "weight_scale") / 2)


def levels_of(part: Part) -> Tensor:
    """Twice the numbers."""
    return twice(part.tensor("weight_packed"))


def twice(packed: Tensor) -> Tensor:
    """Twice the numbers of bytes (O, H / 2)."""
    return torch.tensor(TWICE, dtype=torch.int8)[nibbles(packed).int()]


def block_numbers(part: Part) -> Numbers:
    """The same of gpt-oss's tensors."""
    shape = part.tensors["scales"].shape
    if len(shape) != 2 or not all(shape):
        part.fail("scales", f"has shape {list(shape)}, which is none of a matrix", SAME_MODEL)
    part.expect("scales", EXPONENTS, shape)
    part.expect("blocks", ("U8",), (*shape, GROUP // 2))
    return Numbers("int8", (shape[0], GROUP * shape[1]), GROUP, powers(part, "scales") / 2)


MXFP4 = Layout(
    needed=("weight_packed", "weight_scale"),
    optional=(),
    numbers=numbers_of,
    levels=levels_of,
    scale="weight_scale",
)
BLOCKS = Layout(
    needed=("blocks", "scales"),
    optional=(),
    numbers=block_numbers,
    levels=lambda part: twice(part.tensor("blocks").flatten(1)),
    scale="scales",
)
