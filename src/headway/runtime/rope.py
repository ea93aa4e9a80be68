"""Rotary position embedding: the table of angles, with Llama 3.1's frequency scaling."""

import math

import torch
from torch import Tensor

from headway.core.model_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """theta^(-2i / head_dim) for i < head_dim / 2, scaled as `rope` says; (D/2,) fp32.

    llama3 (Meta's reference for Llama 3.1): wavelengths beyond original_max_len / low_freq_factor
    are stretched by `factor`, those below original_max_len / high_freq_factor stay, and the ones
    between are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(
        wavelengths > rope.original_max_len / low, frequencies / rope.factor, blended
    )
    return torch.where(wavelengths < rope.original_max_len / high, frequencies, stretched)


class RopeTable:
    """cos and sin for every position up to `max_len`, fp32, (max_len, 1, D/2)."""

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, device: str) -> None:
        positions = torch.arange(max_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))[:, None, :]
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of these positions, each (T, 1, D/2)."""
        return self.cos[positions_T], self.sin[positions_T]
