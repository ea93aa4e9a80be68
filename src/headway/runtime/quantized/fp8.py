"""FP8 e4m3: weight = number · scale, with a scale for the matrix, an output or a block of both.

DeepSeek and Qwen write blocks of 128 outputs and 128 inputs as `weight_scale_inv`, which multiplies
all the same.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.parts import AGAIN, Layout, Numbers, Part, scales_of

NAN_CODE = 0x7F
SCALE_TYPES = ("F32", "BF16", "F16")
EXPONENTS = ("F8_E8M0", "U8")
"""Scales that are powers of two: 2^(byte - 127); 255 is NaN."""


def float_numbers(part: Part, suffix: str) -> Numbers:
    """Scales by output and by block of inputs."""
    shape = outputs, inputs = part.expect_matrix("weight", ("F8_E4M3",))
    high, wide = part.scheme.block
    entry = part.tensors[suffix]
    if not high and entry.shape == (outputs, 1) and outputs > 1:
        high = 1  # said to be for the matrix, and is for each output
    if not high:
        part.expect(suffix, SCALE_TYPES, (), (1,), (1, 1))
        scales = scales_of(part, suffix).reshape(1, 1).expand(outputs, 1)
        return Numbers("fp8", shape, 0, scales.contiguous())
    rows, columns = -(-outputs // high), -(-inputs // wide) if wide else 1
    shapes = [(rows, columns), *([(rows,)] if columns == 1 else [])]
    part.expect(suffix, (*SCALE_TYPES, *EXPONENTS), *shapes)
    scales = powers(part, suffix) if entry.dtype in EXPONENTS else scales_of(part, suffix)
    scales = scales.reshape(rows, columns).repeat_interleave(high, 0)[:outputs]
    return Numbers("fp8", shape, wide if wide < inputs else 0, scales.contiguous())


def powers(part: Part, suffix: str) -> Tensor:
    """Scales that are stored as exponents."""
    exponents = part.tensor(suffix).view(torch.uint8)
    if bool((exponents == 255).any()):
        part.fail(suffix, "holds a scale that is NaN or infinite")
    return torch.exp2(exponents.float() - 127)


def float_levels(part: Part) -> Tensor:
    """The numbers; CheckpointError for a NaN."""
    numbers = part.tensor("weight")
    if bool(((numbers.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
        part.fail("weight", "holds a NaN (0x7F or 0xFF)", AGAIN)
    return numbers


def layout(suffix: str) -> Layout:
    """With the scales in a tensor of this name."""
    return Layout(
        needed=("weight", suffix),
        optional=(),
        numbers=lambda part: float_numbers(part, suffix),
        levels=float_levels,
        scale=suffix,
    )


FP8 = layout("weight_scale_inv")
FP8_DIRECT = layout("weight_scale")
