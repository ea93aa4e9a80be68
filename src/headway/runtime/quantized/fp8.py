"""FP8 e4m3: weight = number · scale, with a scale for the matrix, an output, or a block of both.

DeepSeek and Qwen write blocks of 128 outputs and 128 inputs as `weight_scale_inv`, which, despite
its name, is multiplied as well.
"""

import torch
from torch import Tensor

from headway.runtime.quantized.matrix import (
    QUANTIZE_AGAIN,
    Layout,
    QuantParams,
    StoredMatrix,
    read_scales,
)

NAN_CODE = 0x7F
SCALE_TYPES = ("F32", "BF16", "F16")
EXPONENT_TYPES = ("F8_E8M0", "U8")
"""Types of scales that are powers of two: 2^(byte - 127); 255 is NaN."""


def read_float_params(matrix: StoredMatrix, suffix: str) -> QuantParams:
    """Return the scales by output and by block of inputs."""
    shape = outputs, inputs = matrix.expect_matrix("weight", ("F8_E4M3",))
    high, wide = matrix.scheme.block
    entry = matrix.tensors[suffix]
    if not high and entry.shape == (outputs, 1) and outputs > 1:
        high = 1  # the config says one scale, the file has one for each output
    if not high:
        matrix.expect(suffix, SCALE_TYPES, (), (1,), (1, 1))
        scales = read_scales(matrix, suffix).reshape(1, 1).expand(outputs, 1)
        return QuantParams("fp8", shape, 0, scales.contiguous())
    rows, columns = -(-outputs // high), -(-inputs // wide) if wide else 1
    shapes = [(rows, columns), *([(rows,)] if columns == 1 else [])]
    matrix.expect(suffix, (*SCALE_TYPES, *EXPONENT_TYPES), *shapes)
    scales = (
        read_exponent_scales(matrix, suffix)
        if entry.dtype in EXPONENT_TYPES
        else read_scales(matrix, suffix)
    )
    scales = scales.reshape(rows, columns).repeat_interleave(high, 0)[:outputs]
    return QuantParams("fp8", shape, wide if wide < inputs else 0, scales.contiguous())


def read_exponent_scales(matrix: StoredMatrix, suffix: str) -> Tensor:
    """Return scales that are stored as exponents."""
    exponents = matrix.tensor(suffix).view(torch.uint8)
    if bool((exponents == 255).any()):
        matrix.fail(suffix, "holds a scale that is NaN or infinite")
    return torch.exp2(exponents.float() - 127)


def read_float_levels(matrix: StoredMatrix) -> Tensor:
    """Return the numbers. Raises CheckpointError for a NaN."""
    levels = matrix.tensor("weight")
    if bool(((levels.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
        matrix.fail("weight", "holds a NaN (0x7F or 0xFF)", QUANTIZE_AGAIN)
    return levels


def make_layout(suffix: str) -> Layout:
    """Return the layout with the scales in the tensor `suffix`."""
    return Layout(
        needed=("weight", suffix),
        optional=(),
        params=lambda matrix: read_float_params(matrix, suffix),
        levels=read_float_levels,
        scale=suffix,
    )


FP8 = make_layout("weight_scale_inv")
FP8_DIRECT = make_layout("weight_scale")
