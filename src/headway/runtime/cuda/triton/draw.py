"""Sampling in one kernel: temperature, min_p, top_k, top_p and the draw, one program per row.

It gives the numbers of `cuda.sampling.choose` behind its edits: a floor is found by halving the
range of all floats 32 times. A program reads its row of V logits once for the greatest, 32 times
each for top_k and top_p where the row uses them, and twice for the draw. Sums are fp64, block by
block: a token at the very edge of top_p or of the draw, within 1e-15 of the mass, may differ from
torch's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runtime.cuda.sampling import RowInputs
from headway.runtime.cuda.triton.types import power_of_two

BLOCK = 2048


@triton.jit
def likely(logits, start, temperature, floor, V, BLOCK: tl.constexpr):
    """Return a block's logits over the temperature, -inf below the floor and behind V."""
    at = start + tl.arange(0, BLOCK)
    values = tl.load(logits + at, mask=at < V, other=float("-inf"))
    values = tl.math.div_rn(values, temperature)
    return tl.where(values >= floor, values, float("-inf"))


@triton.jit
def key_of(values):
    """Return int32 keys in the order of fp32 numbers: bits, inverted for negative ones."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def raised(floor, key):
    """Return the number of this key where it is no NaN and above the floor, else the floor."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
    number = bits.to(tl.float32, bitcast=True)
    is_number = (key > -2139095041) & (key <= 2139095040)
    return tl.where(is_number & (number > floor), number, floor)


@triton.jit
def mass_of(values, top):
    """Return the mass relative to the likeliest token, in fp64."""
    return tl.exp(values.to(tl.float64) - top)


@triton.jit
def mass_above(logits, temperature, floor, key, top, V, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of the tokens from this key on; with COUNTS their number."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        values = likely(logits, start, temperature, floor, V, BLOCK)
        is_above = (key_of(values).to(tl.int64) >= key) & (values > float("-inf"))
        weights = is_above.to(tl.float64)
        if not COUNTS:
            weights = tl.where(is_above, mass_of(values, top), 0.0)
        total += weights
    return tl.sum(total, 0)


@triton.jit
def floor_of(logits, temperature, floor, target, top, V, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the greatest floor whose tokens have `target` of the mass, or of the count."""
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483647, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        mass = mass_above(logits, temperature, floor, middle, top, V, COUNTS, BLOCK)
        low = tl.where(mass >= target, middle, low)
        high = tl.where(mass >= target, high, middle - 1)
    return raised(floor, low)


@triton.jit
def draw_kernel(
    chosen, logits, greedy, temperatures, log_min_p, top_k, top_p, u, V, BLOCK: tl.constexpr
):
    """One row per program; -1 where all tokens are forbidden."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    best = tl.full((), float("-inf"), tl.float32)
    place = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < V, other=float("-inf"))
        most = tl.max(values, 0)
        first = start + tl.argmax(values, 0)
        place = tl.where(most > best, first, place)
        best = tl.maximum(best, most)
    token = tl.where(best > float("-inf"), place, -1)
    if (tl.load(greedy + row) == 0) & (best > float("-inf")):
        temperature = tl.load(temperatures + row)
        top = tl.math.div_rn(best, temperature)
        floor = top + tl.load(log_min_p + row)
        num_top = tl.load(top_k + row)
        if num_top < V:
            count = num_top.to(tl.float64)
            floor = floor_of(logits, temperature, floor, count, top, V, True, BLOCK)
        share = tl.load(top_p + row)
        if share < 1.0:
            all_of = mass_above(logits, temperature, floor, -2147483648, top, V, False, BLOCK)
            mass = all_of * share.to(tl.float64)
            floor = floor_of(logits, temperature, floor, mass, top, V, False, BLOCK)
        total = mass_above(logits, temperature, floor, -2147483648, top, V, False, BLOCK)
        target = total * tl.load(u + row)
        before = tl.full((), 0.0, tl.float64)
        token = tl.full((), 0, tl.int32)
        for start in range(0, V, BLOCK):
            values = likely(logits, start, temperature, floor, V, BLOCK)
            masses = tl.where(values > float("-inf"), mass_of(values, top), 0.0)
            reached = before + tl.cumsum(masses, 0)
            token += tl.sum((reached <= target).to(tl.int32), 0)
            before += tl.sum(masses, 0)
        token = tl.minimum(token, V - 1)
    tl.store(chosen + row, token.to(tl.int64))


def draw(logits_RV: Tensor, rows: RowInputs) -> Tensor:
    """Return a token for each row of edited fp32 logits, NO_TOKEN where all are forbidden, (R,)."""
    logits_RV = logits_RV.contiguous()
    count, vocabulary = logits_RV.shape
    chosen_R = torch.empty(count, dtype=torch.int64, device=logits_RV.device)
    if count:
        block = min(BLOCK, power_of_two(vocabulary))
        draw_kernel[(count,)](
            chosen_R, logits_RV, rows.greedy_R, rows.temperature_R1, rows.min_p_R1.log(),
            rows.top_k_R1, rows.top_p_R1, rows.u_R1, vocabulary, block, num_warps=8,
        )  # fmt: skip
    return chosen_R
