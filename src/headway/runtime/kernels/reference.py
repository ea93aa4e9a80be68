"""Every operation in plain torch: the definition of correct, on any device.

T tokens, H hidden size, N heads, D head size, R rotated dims, I MLP size, O outputs of a linear
layer.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.rounding import RoundedWeight, fused, rotate, round_rows, round_rows_fp8


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, (T, O), in the type of x.

    Rows in fp32 on weights of 16 bits give fp32 sums. On a CPU the weights are converted, one panel
    of cache size at a time; on a GPU the rows are rounded to the type of the weights.
    """
    if x_TH.dtype == weight_OH.dtype:
        return functional.linear(x_TH, weight_OH, bias_O)
    if weight_OH.is_cuda:
        out_TO = torch.mm(x_TH.to(weight_OH.dtype), weight_OH.T, out_dtype=x_TH.dtype)
    else:
        panels = weight_OH.split(max(1, PANEL_NUMBERS // weight_OH.shape[1]))
        products = [functional.linear(x_TH, panel.to(x_TH.dtype)) for panel in panels]
        out_TO = torch.cat(products, -1)
    return with_bias(out_TO, bias_O)


VECTOR = 64
"""A multiple of the vector width of torch."""
PANEL_NUMBERS = 1 << 20
"""Weights that are converted at once: 4 MiB in fp32."""


def quantized_linear(x_TH: Tensor, weight: RoundedWeight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias on rounded numbers, (T, O).

    Inputs are levels q · a, with a scale for each block of a row (`Format.block`). Inputs that
    share both scales are a unit: I is the sum of q · level over it and S that of q, integers that
    fp32 holds exactly (512 · 127 · 128 is below 2^24). All else is fp32, and + is rounded together
    with the product before it:

        whole outputs     of units, first to last     sum = I · a + sum
                          y = sum · scale of the output + bias
        groups            of units, first to last     sum = I · (scale · a) + sum,  s = S · a + s
                          behind each group           sum = s · offset + sum
                          y = sum + bias
    """
    if weight.kind == "fp8":
        return fp8_linear(x_TH, weight, bias_O)
    if weight.order_H is not None:
        x_TH = x_TH[:, weight.order_H.long()]
    format, inputs = weight.format, x_TH.shape[1]
    rows_TH, scales_TB = round_rows(rotate(x_TH) if format.rotated else x_TH, format.block)
    sums_TO = torch.zeros(len(x_TH), len(weight.levels_OH), device=x_TH.device)
    group, whole = weight.group or max(1, inputs), not weight.group and weight.offsets_OG is None
    for index, begin in enumerate(range(0, inputs, group)):
        scale_O = torch.ones_like(weight.scales_OG[:, 0]) if whole else weight.scales_OG[:, index]
        of_rows_T = torch.zeros(len(x_TH), device=x_TH.device)
        for first in range(begin, min(begin + group, inputs), format.unit):
            unit = slice(first, min(first + format.unit, begin + group))
            rows, scale_T = rows_TH[:, unit], scales_TB[:, first // format.block]
            products_TO = functional.linear(rows.float(), weight.levels_OH[:, unit].float())
            sums_TO = fused(products_TO, scale_T[:, None] * scale_O, sums_TO)
            of_rows_T = fused(rows.sum(1, dtype=torch.float32), scale_T, of_rows_T)
        if weight.offsets_OG is not None:
            sums_TO = fused(of_rows_T[:, None], weight.offsets_OG[:, index], sums_TO)
    if not whole:
        return with_bias(sums_TO, bias_O).to(x_TH.dtype)
    bias_O = torch.zeros_like(scale_O) if bias_O is None else bias_O.float()
    return fused(sums_TO, weight.scales_OG[:, 0], bias_O).to(x_TH.dtype)


def with_bias(out_TO: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return out + bias in fp32."""
    return out_TO if bias_O is None else out_TO + bias_O.float()


def fp8_linear(x_TH: Tensor, weight: RoundedWeight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias on numbers of type e4m3: bf16 inputs, scaled sums of groups.

    Products of bf16 are exact in fp32; their sums are rounded in the order of the kernel, so two
    kernels agree within the rounding of fp32 and not to the bit.
    """
    x, levels_OH = x_TH.to(torch.bfloat16).float(), weight.levels_OH.float()
    if weight.order_H is not None:
        x = x[:, weight.order_H.long()]
    size = weight.group or max(1, x.shape[1])
    out_TO = torch.zeros(len(x), len(levels_OH), device=x.device)
    parts = zip(x.split(size, 1), levels_OH.split(size, 1), strict=True)
    for index, (rows, levels) in enumerate(parts):
        out_TO += functional.linear(rows, levels) * weight.scales_OG[:, index]
    return with_bias(out_TO, bias_O).to(x_TH.dtype)


def scaled_fp8_linear(x_TH: Tensor, weight: RoundedWeight, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias with inputs rounded to e4m3 by token, weights scaled by output.

    out = (Σ number · number) · scale of the token · scale of the output; products are exact in
    fp32, sums are rounded in the order of the device.
    """
    rows_TH, scales_T = round_rows_fp8(x_TH)
    sums_TO = functional.linear(rows_TH.float(), weight.levels_OH.float())
    out_TO = sums_TO * (scales_T[:, None] * weight.scales_OG[:, 0])
    return with_bias(out_TO, bias_O).to(x_TH.dtype)


def grouped_linear(
    x_VH: Tensor, weight_EOH: Tensor, bias_EO: Tensor | None, starts_E1: Tensor
) -> Tensor:
    """Return each row times the matrix of its expert plus bias, (V, O).

    Rows are sorted by expert; `starts_E1` is the first row of each. The host reads no number back.
    A matrix is copied for each row, so this is for comparisons only.
    """
    rows_V = torch.arange(len(x_VH), device=x_VH.device)
    expert_V = torch.searchsorted(starts_E1[1:].long(), rows_V, right=True)
    out_VO = torch.bmm(weight_EOH.index_select(0, expert_V), x_VH[..., None])[..., 0]
    return out_VO if bias_EO is None else out_VO + bias_EO.index_select(0, expert_V)


def are_finite(x: Tensor) -> bool:
    """Return whether no number is an infinity or NaN.

    The sum is tested first: it is not finite if a number is not, and takes a tenth of the time.
    """
    summed = math.isfinite(x.sum(dtype=torch.float32).item())
    return summed or bool(torch.isfinite(x).all())


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, the mean in fp32 (Zhang & Sennrich 2019).

    With an offset the factor is `offset` + weight, multiplied in fp32 (Gemma's 1 + w).
    """
    x = x_TH.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (x * (offset + weight_H.float())).to(x_TH.dtype)
    return weight_H * x.to(x_TH.dtype)


def add_rms_norm(
    x_TH: Tensor, more_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (x + more, its `rms_norm`): the residual, and the input of the next layer."""
    total_TH = x_TH + more_TH
    return total_TH, rms_norm(total_TH, weight_H, eps, offset)


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """Return SwiGLU's activation: silu(first half) · second half (Shazeer 2020), (T, I)."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    return functional.silu(gate) * up


def evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to each number, with bits that do not depend on its place in `x`.

    Torch computes an incomplete last vector by other code, so `x` is padded with zeros to whole
    vectors of each thread.
    """
    unit = VECTOR * torch.get_num_threads()
    flat = x.new_zeros(-(-x.numel() // unit) * unit)
    flat[: x.numel()] = x.flatten()
    return function(flat)[: x.numel()].view(x.shape)


def scan(
    state_RHKV: Tensor,
    q_RLGK: Tensor,
    k_RLGK: Tensor,
    v_RLHV: Tensor,
    decay_RLH: Tensor,
    gain_RLH: Tensor,
    is_delta: bool,
) -> Tensor:
    """Advance states by L tokens, one after the other; return their outputs, (R, L, H, V).

    S = decay · S + k ⊗ gain · v, or by the delta rule gain · (v − decay · Sᵀk) in place of
    gain · v; then Sᵀq. Head h has the query and key h // (H / G). All tensors are fp32;
    `state_RHKV` is changed.
    """
    each = state_RHKV.shape[1] // q_RLGK.shape[2]
    out_RLHV = torch.empty_like(v_RLHV)
    q_RLHK, k_RLHK = (x.repeat_interleave(each, 2) for x in (q_RLGK, k_RLGK))
    for at in range(v_RLHV.shape[1]):
        k_RHK1, q_RHK1 = (x[:, at, :, :, None] for x in (k_RLHK, q_RLHK))
        state_RHKV *= decay_RLH[:, at, :, None, None]
        v_RHV = v_RLHV[:, at]
        if is_delta:
            v_RHV = v_RHV - (state_RHKV * k_RHK1).sum(-2)
        state_RHKV += k_RHK1 * (v_RHV * gain_RLH[:, at, :, None])[:, :, None]
        out_RLHV[:, at] = (state_RHKV * q_RHK1).sum(-2)
    return out_RLHV


def clamped_silu_mul(gate_up_TI2: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gpt-oss's activation: gate · sigmoid(alpha · gate) · (up + 1), clamped, (T, I)."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def gelu_tanh_mul(gate_up_TI2: Tensor) -> Tensor:
    """Return GeGLU's activation, gelu by tanh: gelu(first half) · second half, (T, I)."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def rope(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + R/2]) by the position's angles (Su et al. 2021).

    `cos_TR` and `sin_TR` are fp32, (T, 1, R/2); dims beyond the R rotated ones stay.
    """
    half = cos_TR.shape[-1]
    first, second = x_TND[..., :half].float(), x_TND[..., half : 2 * half].float()
    rotated = torch.cat((first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR), -1)
    rotated = rotated.to(x_TND.dtype)
    return (
        torch.cat((rotated, x_TND[..., 2 * half :]), -1) if x_TND.shape[-1] > 2 * half else rotated
    )
