"""Every operation in plain torch: the definition of correct, on any device.

T tokens, H hidden size, N heads, D head size, I MLP size, O outputs of a linear layer.
"""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, (T, O)."""
    return functional.linear(x_TH, weight_OH, bias_O)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, the mean in fp32 (Zhang & Sennrich 2019)."""
    x = x_TH.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight_H * x.to(x_TH.dtype)


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """SwiGLU's middle: silu(first half) · second half (Shazeer 2020), (T, I)."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rope(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by the position's angles (Su et al. 2021).

    `cos_TD` and `sin_TD` are fp32, (T, 1, D/2).
    """
    first, second = x_TND.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), -1)
    return rotated.to(x_TND.dtype)
