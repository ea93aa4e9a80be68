"""Rotary position embedding: the table of angles, with the scalings that stretch a context."""

import math

import torch
from torch import Tensor

from headway.core.model_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, num_dims: int, max_len: int) -> Tensor:
    """theta^(-2i / R) for i < R / 2, R = `num_dims` rotated dims, scaled as `rope` says; fp32."""
    if rope.kind == "dynamic":
        return plain(dynamic_theta(rope, num_dims, max_len), num_dims)
    frequencies = plain(rope.theta, num_dims)
    if rope.kind == "longrope":
        beyond = max_len > rope.original_max_len
        return longrope(rope.long_factors if beyond else rope.short_factors, rope.theta)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return llama3(rope, frequencies)
    if rope.kind == "yarn":
        return yarn(rope, frequencies)
    return frequencies


def plain(theta: float, num_dims: int) -> Tensor:
    """The frequencies of RoFormer (Su et al. 2021)."""
    exponents = torch.arange(0, num_dims, 2, dtype=torch.int64).float() / num_dims
    return 1.0 / (theta**exponents)


def dynamic_theta(rope: RopeSpec, num_dims: int, max_len: int) -> float:
    """NTK-aware theta for the served context, the same for every request.

    Stretching with each request's own length, as the method has it, would make a token's key
    depend on how its prompt was cut. A context of 8,192 over an original 4,096 with factor 2:
    theta · 3^(R / (R - 2)).
    """
    length = max(max_len, rope.original_max_len)
    stretch = rope.factor * length / rope.original_max_len - (rope.factor - 1)
    return float(rope.theta * stretch ** (num_dims / (num_dims - 2)))


def llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths stretched by `factor`, short ones kept, blended between.

    Long is beyond original_max_len / low_freq_factor, short below it / high_freq_factor.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(
        wavelengths > rope.original_max_len / low, frequencies / rope.factor, blended
    )
    return torch.where(wavelengths < rope.original_max_len / high, frequencies, stretched)


def longrope(factors: tuple[float, ...], theta: float) -> Tensor:
    """LongRoPE: each frequency divided by its own factor, the same for every request."""
    return plain(theta, 2 * len(factors)) / torch.tensor(factors)


def yarn(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): dims that turn often keep their frequency, slow ones interpolate.

    A dim that turns beta_fast times or more within the original context is kept, one that turns
    at most beta_slow times is slowed by `factor`, with a ramp between.
    """
    num_dims = 2 * frequencies.numel()

    def dim_that_turns(times: float) -> float:
        span = rope.original_max_len / (times * 2 * math.pi)
        return float(num_dims * math.log(span) / (2 * math.log(rope.theta)))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    ramp = (torch.arange(num_dims // 2).float() - low) / (high - low if high != low else 0.001)
    slowed = ramp.clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


class RopeTable:
    """cos and sin for every position up to `max_len`, times the gain, fp32, (max_len, 1, R/2)."""

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, device: str) -> None:
        num_dims = int(head_dim * rope.share)
        positions = torch.arange(max_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, num_dims, max_len))[:, None, :]
        self.cos = (angles.cos() * rope.gain).to(device)
        self.sin = (angles.sin() * rope.gain).to(device)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of these positions, each (T, 1, R/2)."""
        return self.cos[positions_T], self.sin[positions_T]
