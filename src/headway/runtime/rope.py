"""Rotary position embedding: the table of angles, with the scalings that stretch a context.

Where the frequencies depend on the lengths of a request (`RopeSpec.scaled_len`), the table has rows
for each case, and a token reads the row of its position and its request (`RopeRows`).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.config.resolve import Settings
from headway.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, num_dims: int, max_len: int) -> Tensor:
    """Return theta^(-2i / R) for i < R / 2 in fp32, R = `num_dims` rotated dims.

    They are scaled by the method of `rope`, for sequences of `max_len` tokens where that matters.
    """
    if rope.kind == "dynamic":
        return base_frequencies(float(dynamic_theta(rope, num_dims, max_len)), num_dims)
    frequencies = base_frequencies(rope.theta, num_dims)
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


def base_frequencies(theta: float | Tensor, num_dims: int) -> Tensor:
    """Return the frequencies of RoFormer (Su et al. 2021), (R/2), or (n, R/2) of thetas (n, 1)."""
    exponents = torch.arange(0, num_dims, 2, dtype=torch.int64).float() / num_dims
    frequencies: Tensor = 1.0 / (theta**exponents)
    return frequencies


def dynamic_theta(rope: RopeSpec, num_dims: int, lens: int | np.ndarray) -> np.ndarray:
    """Return the NTK-aware theta for sequences of `lens` tokens, as in transformers.

    8,192 tokens over an original 4,096 with factor 2: theta · 3^(R / (R - 2)).
    """
    beyond = np.maximum(lens, rope.original_max_len) / rope.original_max_len
    stretch = rope.factor * beyond - (rope.factor - 1)
    thetas: np.ndarray = rope.theta * stretch ** (num_dims / (num_dims - 2))
    return thetas


def llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Scale as Llama 3.1: stretch long wavelengths by `factor`, keep short ones, blend between.

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
    """Scale as LongRoPE: divide each frequency by its own factor."""
    return base_frequencies(theta, 2 * len(factors)) / torch.tensor(factors)


def yarn(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Scale as YaRN (Peng et al. 2023): keep fast dims, interpolate slow ones.

    A dim that turns beta_fast times or more within the original context keeps its frequency, one
    that turns at most beta_slow times is slowed by `factor`, with a ramp between.
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


def query_scale(rope: RopeSpec, positions_P: Tensor) -> Tensor:
    """Return by what queries at these positions are multiplied (Llama 4's temperature), (P,)."""
    return 1 + rope.query_beta * torch.log1p((positions_P / rope.original_max_len).floor())


class ScaledPrompts(NamedTuple):
    """Prompt tokens that dynamic NTK scales: their positions, and the lengths of their prompts."""

    positions: np.ndarray
    lens: np.ndarray


class RopeRows:
    """The rows of the rope tables that tokens read.

    `rope` is the rope with frequencies that depend on lengths, None where there is none; `max_len`
    is the served context, `max_tokens` the maximum of a step. Rows, with an original length of 4:

        longrope   0 1 2 3 | 0 1 2 3 4 5 …     positions by the short factors, by the long ones
        dynamic    0 1 2 3 4 5 … | - - -       position p scaled for p + 1 tokens, for answers; then
                                               rows for the scaled prompts of one step
    """

    def __init__(self, rope: RopeSpec | None, max_len: int, max_tokens: int = 0) -> None:
        self.max_len = max_len
        self.original = max_len if rope is None else rope.original_max_len
        self.kind = "default" if rope is None or max_len <= self.original else rope.kind
        self.num_prompt = max_tokens if self.kind == "dynamic" else 0

    def rows_for(
        self, positions: np.ndarray, scaled_lens: np.ndarray
    ) -> tuple[np.ndarray, ScaledPrompts | None]:
        """Return (the rows of tokens, the tokens that `RopeTable.fill` has to fill rows for).

        `scaled_lens` are the lengths that the requests of the tokens are scaled for.
        """
        if self.kind == "longrope":
            return np.where(scaled_lens > 0, positions + self.original, positions), None
        places = np.flatnonzero(positions < scaled_lens)
        rows = positions.copy()
        rows[places] = self.max_len + np.arange(len(places))
        return rows, ScaledPrompts(positions[places], scaled_lens[places]) if len(places) else None


def rope_rows(settings: Settings) -> RopeRows | None:
    """Return the rows of the tokens of a server; None: the rows are the positions."""
    rows = RopeRows(settings.rope, settings.max_model_len, settings.max_num_batched_tokens)
    return None if rows.kind == "default" else rows


class RopeTable:
    """cos and sin of every row of `rows`, times the gain, in fp32, (rows, 1, R/2).

    Without `rows` it has one row for each position below `max_len`, scaled for that length.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, max_len: int, device: str, rows: RopeRows | None = None
    ) -> None:
        self._rope, self._num_dims = rope, int(head_dim * rope.share)
        self._rows = rows = rows or RopeRows(None, max_len)
        positions = torch.arange(max_len, dtype=torch.float32)
        base_frequencies = inverse_frequencies(rope, self._num_dims, max_len)
        angles = torch.outer(positions, base_frequencies)
        if rows.kind == "longrope":
            short = inverse_frequencies(rope, self._num_dims, rows.original)
            angles = torch.cat((torch.outer(positions[: rows.original], short), angles))
        elif rows.kind == "dynamic":
            grown = positions[:, None] * self._frequencies(np.arange(1, max_len + 1))
            angles = torch.cat((grown, torch.zeros(rows.num_prompt, base_frequencies.numel())))
        self.cos, self.sin = (part.to(device) for part in self._cos_sin(angles))
        if rope.query_beta:
            scale_P11 = query_scale(rope, positions)[:, None, None].to(device)
            self.cos, self.sin = self.cos * scale_P11, self.sin * scale_P11

    def at(self, rows_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of these rows, each (T, 1, R/2)."""
        return self.cos[rows_T], self.sin[rows_T]

    def fill(self, prompt: ScaledPrompts | None) -> None:
        """Write the angles of a step's scaled prompts into the rows of `RopeRows.rows_for`."""
        if prompt is None:
            return
        positions = torch.from_numpy(prompt.positions).float()[:, None]
        cos, sin = self._cos_sin(positions * self._frequencies(prompt.lens))
        places = slice(self._rows.max_len, self._rows.max_len + len(cos))
        self.cos[places].copy_(cos)
        self.sin[places].copy_(sin)

    def _frequencies(self, lens: np.ndarray) -> Tensor:
        """Return the frequencies for sequences of `lens` tokens, (n, R/2); (R/2) if independent."""
        if self._rope.kind != "dynamic":
            return inverse_frequencies(self._rope, self._num_dims, self._rows.max_len)
        thetas = torch.from_numpy(dynamic_theta(self._rope, self._num_dims, lens))
        return base_frequencies(thetas.float()[:, None], self._num_dims)

    def _cos_sin(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        angles = angles[:, None, :]
        return angles.cos() * self._rope.gain, angles.sin() * self._rope.gain
