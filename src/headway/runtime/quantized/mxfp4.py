"""MXFP4 as compressed-tensors packs it: e2m1 numbers, two a byte, and a power of two for each 32.

Twice an e2m1 number is a whole one of -12 … 12, so that the matrix is int8 by 32, exactly.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.fp8 import EXPONENTS, powers
from headway.runtime.quantized.parts import Layout, Numbers, Part, group_size, nibbles

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
    codes = nibbles(part.tensor("weight_packed"))
    return torch.tensor(TWICE, dtype=torch.int8)[codes.int()]


MXFP4 = Layout(
    needed=("weight_packed", "weight_scale"),
    optional=(),
    numbers=numbers_of,
    levels=levels_of,
    scale="weight_scale",
)
