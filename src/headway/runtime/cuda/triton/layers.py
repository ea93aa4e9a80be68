"""The operations between the GEMMs of a layer, one pass each: norm, gate, rope.

T tokens, H channels, I MLP size, N heads, D head size, R rotated dims.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runtime.cuda.triton.types import TYPES, power_of_two


@triton.jit
def rms_norm_kernel(
    out, x, weight, stride, eps, OFFSET: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < H
    values = tl.load(x + row * stride + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / H
    values = values * (1.0 / tl.sqrt(mean + eps))
    if OFFSET != 0.0:
        values = values * (OFFSET + scale)
    else:  # as the reference: rounded to the type, then scaled
        values = values.to(TYPE).to(tl.float32) * scale
    tl.store(out + row * H + at, values.to(TYPE), mask=live)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `reference.rms_norm`, for any number of leading dims."""
    size = x_TH.shape[-1]
    flat = x_TH if x_TH.dim() == 2 and x_TH.stride(1) == 1 else x_TH.reshape(-1, size)
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    if flat.shape[0]:
        block = power_of_two(size)
        rms_norm_kernel[(flat.shape[0],)](
            out, flat, weight_H, flat.stride(0), eps, float(offset), size, block,
            TYPES[x_TH.dtype], num_warps=warps(block),
        )  # fmt: skip
    return out


@triton.jit
def gated_kernel(out, gate_up, I, GELU: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """A block of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < I
    gate = tl.load(gate_up + row * 2 * I + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + at, mask=live, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        activated = 0.5 * gate * (1.0 + tanh)
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * I + at, (activated.to(TYPE).to(tl.float32) * up).to(TYPE), mask=live)


def gated(gate_up_TI2: Tensor, gelu: bool) -> Tensor:
    """Return act(first half) · second half, (T, I)."""
    tokens, inner = gate_up_TI2.shape[0], gate_up_TI2.shape[-1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if tokens:
        block = min(power_of_two(inner), 1024)
        gated_kernel[(tokens, triton.cdiv(inner, block))](
            out, gate_up_TI2.contiguous(), inner, gelu, block, TYPES[out.dtype], num_warps=4
        )
    return out


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """Return `reference.silu_mul`."""
    return gated(gate_up_TI2, gelu=False)


def gelu_tanh_mul(gate_up_TI2: Tensor) -> Tensor:
    """Return `reference.gelu_tanh_mul`."""
    return gated(gate_up_TI2, gelu=True)


@triton.jit
def rope_kernel(
    out, x, cos, sin, stride_t, stride_n, N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """All heads of one token per program; channel d reads its partner, HALF away."""
    token = tl.program_id(0).to(tl.int64)
    heads, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    live = (heads < N)[:, None] & (at < D)[None, :]
    rotated = at < 2 * HALF
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    partner = tl.where(rotated, partner, at)
    begin = x + token * stride_t + heads[:, None] * stride_n
    own = tl.load(begin + at[None, :], mask=live, other=0.0).to(tl.float32)
    other = tl.load(begin + partner[None, :], mask=live, other=0.0).to(tl.float32)
    angle = token * HALF + at % HALF
    c = tl.load(cos + angle, mask=rotated, other=1.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    s = tl.where(at < HALF, -s, s)
    turned = own * c[None, :] + other * s[None, :]
    tl.store(out + token * N * D + heads[:, None] * D + at[None, :], turned.to(TYPE), mask=live)


def rope(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return `reference.rope`; the last dim of x is contiguous, angles are (T, 1, R / 2)."""
    tokens, heads, size = x_TND.shape
    if x_TND.stride(2) != 1:
        x_TND = x_TND.contiguous()
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    if tokens:
        rope_kernel[(tokens,)](
            out, x_TND, cos_TR.contiguous(), sin_TR.contiguous(), x_TND.stride(0), x_TND.stride(1),
            heads, size, cos_TR.shape[-1], power_of_two(heads), power_of_two(size),
            TYPES[out.dtype], num_warps=4,
        )  # fmt: skip
    return out


def warps(block: int) -> int:
    """Return the warps for a row of `block` numbers: 8 numbers a thread, 4 to 16 warps."""
    return min(max(block // 256, 4), 16)
