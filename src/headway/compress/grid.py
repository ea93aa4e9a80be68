"""The levels of a quantized weight and their scales.

    weight = level · scale      int4: levels -8 … 7, a scale for `group` inputs
                                int8: levels -127 … 127, a scale for an output

O outputs, I inputs, G groups of inputs that share a scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.rounding import LEVELS, RoundedWeight, extremes
from headway.spec.formats import Format

SHRINKS = tuple(1 - step / 40 for step in range(17))
"""Candidates of a searched scale, relative to that of the largest number: 1.0 … 0.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRule:
    """How scales are chosen: their type in the file, their sign, and whether they are searched.

    `dtype` "bfloat16" allows only scales that a bf16 reader keeps; scales of int4 are exact in fp16
    too.
    """

    dtype: str = "bfloat16"
    positive: bool = False
    searched: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales (O, G) of a matrix in a format."""

    scales_OG: Tensor
    format: Format

    @property
    def size(self) -> int:
        """Inputs of a group; 0 for int8, where a group is all inputs."""
        return self.format.group

    @property
    def min_level(self) -> int:
        return LEVELS[self.format.kind][0]

    @property
    def max_level(self) -> int:
        return LEVELS[self.format.kind][1]

    def columns(self, inputs: int) -> Tensor:
        """Return the scale of each weight, (O, I)."""
        if not self.size:
            return self.scales_OG.expand(-1, inputs)
        return self.scales_OG.repeat_interleave(self.size, 1)[:, :inputs]

    def nearest(self, weight_OI: Tensor) -> RoundedWeight:
        """Round every weight to the nearest level."""
        scale = self.columns(weight_OI.shape[1])
        levels = (weight_OI.float() / scale).nan_to_num(0, 0, 0).round()
        return RoundedWeight(
            levels.clamp(self.min_level, self.max_level).to(torch.int8), self.scales_OG, self.size
        )


def grid_for(
    weight_OI: Tensor, format: Format, rule: GridRule, importance_I: Tensor | None = None
) -> Grid:
    """Return the scales of a matrix; `importance_I` weights the squared errors of a search."""
    weight = grouped(weight_OI.float(), format)
    scales_OG = initial_scales(weight, format, rule)
    if rule.searched:
        scales_OG = search_scales(weight, scales_OG, format, rule, importance_I)
    return Grid(scales_OG, format)


def grouped(weight_OI: Tensor, format: Format) -> Tensor:
    """Return (O, G, inputs of a group); the last group is padded with zeros."""
    size = format.group or weight_OI.shape[1]
    missing = -weight_OI.shape[1] % size
    padded: Tensor = functional.pad(weight_OI, (0, missing)).unflatten(1, (-1, size))
    return padded


def initial_scales(weight_OGI: Tensor, format: Format, rule: GridRule) -> Tensor:
    """Return the scales at which the largest number just fits."""
    min_level, max_level = LEVELS[format.kind]
    if format.kind == "int4" and not rule.positive:
        return as_stored(extremes(weight_OGI) / min_level, rule)
    if format.kind == "int4":
        low, high = weight_OGI.aminmax(dim=-1)
        return as_stored(torch.maximum(high / max_level, low / min_level), rule)
    return as_stored(weight_OGI.abs().amax(-1) / max_level, rule)


def as_stored(scale: Tensor, rule: GridRule) -> Tensor:
    """Return a scale after storage in the file's type, as fp32."""
    return scale.to(getattr(torch, rule.dtype)).float()


def search_scales(
    weight_OGI: Tensor,
    scales_OG: Tensor,
    format: Format,
    rule: GridRule,
    importance_I: Tensor | None,
) -> Tensor:
    """Return, of the SHRINKS of each scale, the one with the least (weighted) squared error."""
    min_level, max_level = LEVELS[format.kind]
    importance = torch.ones(())
    if importance_I is not None:
        importance = grouped(importance_I[None].float(), format)
    best = torch.full(scales_OG.shape, torch.inf)
    chosen = scales_OG
    for shrink in SHRINKS:
        scale = as_stored(scales_OG * shrink, rule)
        levels = (
            (weight_OGI / scale[..., None]).nan_to_num(0, 0, 0).round().clamp(min_level, max_level)
        )
        error = ((levels * scale[..., None] - weight_OGI).square() * importance).sum(-1)
        chosen = torch.where(error < best, scale, chosen)
        best = torch.minimum(best, error)
    return chosen
