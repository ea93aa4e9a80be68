"""GPTQ: int32 words along the inputs, zeros packed along the outputs, inputs perhaps reordered.

weight = scale · (code - zero). Version 1 stores zero - 1, version 2 the zero itself, and the config
is not always right about it: the numbers decide (`find_shift`).
"""

import logging

import torch
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.quantized.parts import (
    AGAIN,
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

log = logging.getLogger(__name__)

SAMPLED = 8
"""Matrices whose codes are looked at; their mean is known to a hundredth of a level then."""
SURE = 0.3
"""A mean as far from the middle between both versions decides against the config: chosen."""


def matrix_shape(part: Part) -> tuple[int, int]:
    """(outputs, inputs), from the scales and g_idx, checked with the packed words."""
    bits = part.scheme.bits
    words, outputs = part.expect_matrix("qweight", ("I32",))
    inputs = words * 32 // bits
    if "g_idx" in part.tensors and part.tensors["g_idx"].shape != (inputs,):
        index = part.tensors["g_idx"].shape
        fits = len(index) == 1 and words_for(index[0], bits) == words
        inputs = index[0] if fits else inputs
    return outputs, inputs


def stored_zeros(part: Part, outputs: int, groups: int) -> Tensor:
    """The zeros (G, O) as bytes, as they are stored."""
    bits = part.scheme.bits
    part.expect("qzeros", ("I32",), (groups, words_for(outputs, bits)))
    return codes_along_inputs(part.tensor("qzeros"), bits)[:, :outputs]


def numbers_of(part: Part) -> Numbers:
    """Scales, zeros and order."""
    bits = part.scheme.bits
    shape = outputs, inputs = matrix_shape(part)
    group = group_size(part, inputs)
    groups = inputs // group
    part.expect("scales", ("F16", "BF16", "F32"), (groups, outputs))
    scales = scales_of(part, "scales").T
    middle = 1 << (bits - 1)
    zeros = (stored_zeros(part, outputs, groups).T.long() + part.shift) & (2 * middle - 1)
    kind: Kind = "int4" if bits == 4 else "int8"
    size = kernel_group(kind, group, inputs)
    offsets = None
    if bool((zeros != middle).any()):
        offsets = by_group((middle - zeros).float() * scales, group, size, inputs)
    order = order_of(part, "g_idx", inputs, group) if "g_idx" in part.tensors else None
    return Numbers(kind, shape, size, by_group(scales, group, size, inputs), offsets, order)


def levels_of(part: Part) -> Tensor:
    """Codes less 8 or 128."""
    bits = part.scheme.bits
    _, inputs = matrix_shape(part)
    codes = codes_along_inputs(part.tensor("qweight").T, bits)[:, :inputs]
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def find_shift(parts: list[Part], version: str) -> int:
    """1 where the zeros are stored less one, as version 1 does, else 0.

    Zeros of 7 throughout are version 1's of a symmetric matrix, of 8 version 2's. Others: codes
    less zeros have a mean of about 0 over a matrix, so that less one shows as a mean of 1.
    """
    said = 0 if version == "gptq_v2" else 1
    found = {each for part in parts for each in uniform_zeros(part)}
    if len(found) == 1 and found <= {-1, 0}:
        shift = -found.pop()
    elif found and found <= {-1, 0}:
        raise CheckpointError(
            "Some qzeros of the checkpoint are of GPTQ's version 1, some of version 2.", AGAIN
        )
    else:
        means = [mean_level(part) for part in parts[:: max(1, len(parts) // SAMPLED)][:SAMPLED]]
        mean = sum(means) / len(means)
        shift = said if abs(mean - 0.5) < 0.5 - SURE else int(mean > 0.5)
    if shift != said:
        log.warning(
            "the zeros of the checkpoint are GPTQ's version %d, though its config says %s",
            2 - shift,
            version,
        )
    return shift


def uniform_zeros(part: Part) -> set[int]:
    """What the stored zeros are beside the middle, -1 and 0 for 7 and 8 of four bits; 2: others."""
    part.expect_matrix("qzeros", ("I32",))
    bits, (_, outputs) = part.scheme.bits, part.expect_matrix("qweight", ("I32",))
    stored = codes_along_inputs(part.tensor("qzeros"), bits)[:, :outputs]
    least, most = int(stored.min()), int(stored.max())
    middle = 1 << (bits - 1)
    return {least - middle} if least == most and least - middle in (-1, 0) else {2}


def mean_level(part: Part) -> float:
    """The mean of code less stored zero."""
    outputs, inputs = matrix_shape(part)
    groups = inputs // group_size(part, inputs)
    stored = stored_zeros(part, outputs, groups).float().mean()
    codes = codes_along_inputs(part.tensor("qweight"), part.scheme.bits)
    return float(codes.float().mean() - stored)


GPTQ = Layout(
    needed=("qweight", "qzeros", "scales"),
    optional=("g_idx",),
    numbers=numbers_of,
    levels=levels_of,
    scale="scales",
)
