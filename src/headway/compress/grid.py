"""The levels that a weight may take: scales by the largest number, searched, or of either sign.

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
"""What a searched scale may be of the largest number's: 1.0 … 0.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRule:
    """How scales are found: their type in the file, their sign, whether they are searched.

    `dtype` "bfloat16" keeps what a reader in bf16 keeps; scales of int4 are exact in fp16 as well.
    """

    dtype: str = "bfloat16"
    positive: bool = False
    searched: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales (O, G) of a matrix, the inputs of a group, and the levels there are."""

    scales_OG: Tensor
    format: Format

    @property
    def size(self) -> int:
        """Inputs of a group; of int8 all."""
        return self.format.group

    @property
    def least(self) -> int:
        return LEVELS[self.format.kind][0]

    @property
    def most(self) -> int:
        return LEVELS[self.format.kind][1]

    def columns(self, inputs: int) -> Tensor:
        """The scale of each weight, (O, I)."""
        if not self.size:
            return self.scales_OG.expand(-1, inputs)
        return self.scales_OG.repeat_interleave(self.size, 1)[:, :inputs]

    def nearest(self, weight_OI: Tensor) -> RoundedWeight:
        """Every weight to the nearest level."""
        scale = self.columns(weight_OI.shape[1])
        levels = (weight_OI.float() / scale).nan_to_num(0, 0, 0).round()
        return RoundedWeight(
            levels.clamp(self.least, self.most).to(torch.int8), self.scales_OG, self.size
        )


def grid_for(
    weight_OI: Tensor, format: Format, rule: GridRule, importance_I: Tensor | None = None
) -> Grid:
    """The scales of a matrix; `importance_I` weighs the squared errors of a search."""
    weight = grouped(weight_OI.float(), format)
    scales_OG = starting(weight, format, rule)
    if rule.searched:
        scales_OG = searched(weight, scales_OG, format, rule, importance_I)
    return Grid(scales_OG, format)


def grouped(weight_OI: Tensor, format: Format) -> Tensor:
    """(O, G, inputs of a group); the last is filled up with zeros."""
    size = format.group or weight_OI.shape[1]
    missing = -weight_OI.shape[1] % size
    padded: Tensor = functional.pad(weight_OI, (0, missing)).unflatten(1, (-1, size))
    return padded


def starting(weight_OGI: Tensor, format: Format, rule: GridRule) -> Tensor:
    """The scale that the largest number asks for."""
    least, most = LEVELS[format.kind]
    if format.kind == "int4" and not rule.positive:
        return stored(extremes(weight_OGI) / least, rule)
    if format.kind == "int4":
        low, high = weight_OGI.aminmax(dim=-1)
        return stored(torch.maximum(high / most, low / least), rule)
    return stored(weight_OGI.abs().amax(-1) / most, rule)


def stored(scale: Tensor, rule: GridRule) -> Tensor:
    """As the file keeps it, in fp32."""
    return scale.to(getattr(torch, rule.dtype)).float()


def searched(
    weight_OGI: Tensor,
    scales_OG: Tensor,
    format: Format,
    rule: GridRule,
    importance_I: Tensor | None,
) -> Tensor:
    """Of the SHRINKS of each scale the one with the least (weighted) squared error."""
    least, most = LEVELS[format.kind]
    importance = torch.ones(())
    if importance_I is not None:
        importance = grouped(importance_I[None].float(), format)
    best = torch.full(scales_OG.shape, torch.inf)
    chosen = scales_OG
    for shrink in SHRINKS:
        scale = stored(scales_OG * shrink, rule)
        levels = (weight_OGI / scale[..., None]).nan_to_num(0, 0, 0).round().clamp(least, most)
        error = ((levels * scale[..., None] - weight_OGI).square() * importance).sum(-1)
        chosen = torch.where(error < best, scale, chosen)
        best = torch.minimum(best, error)
    return chosen
