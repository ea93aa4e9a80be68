"""Two fused operations: a sum with the norm behind it, ropes with the write of K and V.

T tokens, H channels, N query heads, G KV heads, D head size, R rotated dims.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runtime.cuda.triton.layers import warps
from headway.runtime.cuda.triton.types import TYPES, power_of_two


@triton.jit
def add_norm_kernel(
    out, total, x, more, weight, stride_x, stride_more, eps, OFFSET: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One row per program; the sum is rounded to the type before its norm, as by two operations."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < H
    own = tl.load(x + row * stride_x + at, mask=live, other=0.0).to(tl.float32)
    added = tl.load(more + row * stride_more + at, mask=live, other=0.0).to(tl.float32)
    summed = (own + added).to(TYPE)
    tl.store(total + row * H + at, summed, mask=live)
    values = summed.to(tl.float32)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / H
    values = values * (1.0 / tl.sqrt(mean + eps))
    if OFFSET != 0.0:
        values = values * (OFFSET + scale)
    else:
        values = values.to(TYPE).to(tl.float32) * scale
    tl.store(out + row * H + at, values.to(TYPE), mask=live)


def add_rms_norm(
    x_TH: Tensor, more_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `reference.add_rms_norm`: (x + more, its norm)."""
    tokens, size = x_TH.shape
    x_TH, more_TH = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TH, more_TH))
    total_TH = torch.empty(tokens, size, dtype=x_TH.dtype, device=x_TH.device)
    out_TH = torch.empty_like(total_TH)
    if tokens:
        block = power_of_two(size)
        add_norm_kernel[(tokens,)](
            out_TH, total_TH, x_TH, more_TH, weight_H, x_TH.stride(0), more_TH.stride(0), eps,
            float(offset), size, block, TYPES[x_TH.dtype], num_warps=warps(block),
        )  # fmt: skip
    return total_TH, out_TH


@triton.jit
def turned(x, cos, sin, token, heads, at, live, stride_n, HALF: tl.constexpr):
    """Return the heads of a token rotated by its angles, fp32."""
    rotated = at < 2 * HALF
    partner = tl.where(rotated, tl.where(at < HALF, at + HALF, at - HALF), at)
    own = tl.load(x + heads[:, None] * stride_n + at[None, :], mask=live, other=0.0)
    other = tl.load(x + heads[:, None] * stride_n + partner[None, :], mask=live, other=0.0)
    angle = token * HALF + at % HALF
    c = tl.load(cos + angle, mask=rotated, other=1.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    s = tl.where(at < HALF, -s, s)
    return own.to(tl.float32) * c[None, :] + other.to(tl.float32) * s[None, :]


@triton.jit
def rope_write_kernel(
    out, q, k, v, k_memory, v_memory, slots, cos, sin, stride_q, stride_k, stride_v,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One token per program: its queries go to `out`, its keys and values to their slot."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_N)
    live = (heads < N)[:, None] & (at < D)[None, :]
    rotated = turned(q + token * stride_q, cos, sin, token, heads, at, live, D, HALF)
    tl.store(out + token * N * D + heads[:, None] * D + at[None, :], rotated.to(TYPE), mask=live)
    slot = tl.load(slots + token)
    groups = tl.arange(0, BLOCK_G)
    live = (groups < G)[:, None] & (at < D)[None, :]
    place = slot * G * D + groups[:, None] * D + at[None, :]
    rotated = turned(k + token * stride_k, cos, sin, token, groups, at, live, D, HALF)
    tl.store(k_memory + place, rotated.to(TYPE), mask=live)
    values = tl.load(v + token * stride_v + groups[:, None] * D + at[None, :], mask=live, other=0.0)
    tl.store(v_memory + place, values, mask=live)


def rope_write(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    angles: tuple[Tensor, Tensor],
    memory: tuple[Tensor, Tensor],
    slots_T: Tensor,
) -> Tensor:
    """Return the rotated queries, (T, N, D); write the rotated keys and the values to their slots.

    `memory` are K and V, (blocks, page, G, D). The heads of a token are consecutive, as in a row of
    qkv.
    """
    tokens, heads, size = q_TND.shape
    kv_heads = k_TGD.shape[1]
    cos_TR, sin_TR = (angle.contiguous() for angle in angles)
    q_TND, k_TGD, v_TGD = (
        x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (q_TND, k_TGD, v_TGD)
    )
    out_TND = torch.empty(tokens, heads, size, dtype=q_TND.dtype, device=q_TND.device)
    if tokens:
        rope_write_kernel[(tokens,)](
            out_TND, q_TND, k_TGD, v_TGD, *memory, slots_T, cos_TR, sin_TR,
            q_TND.stride(0), k_TGD.stride(0), v_TGD.stride(0), heads, kv_heads, size,
            cos_TR.shape[-1], power_of_two(heads), power_of_two(kv_heads), power_of_two(size),
            TYPES[q_TND.dtype], num_warps=4,
        )  # fmt: skip
    return out_TND
