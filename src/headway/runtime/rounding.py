"""Weights and activations as small integers and their scales: the definition, in plain torch.

T tokens, H inputs, O outputs of a linear layer, G groups of inputs that share a scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = {"int8": (-127, 127), "int4": (-8, 7)}
SMALLEST_ROW = 1e-30
"""A row whose largest number is not above it counts as zeros."""
ROUNDED_AT_ONCE = 1 << 22
"""Weights that are copied to fp32 at a time: 16 MiB."""


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """Levels (O, H) in int8, fp32 scales (O, G), and the inputs of a group; 0: one group."""

    levels_OH: Tensor
    scales_OG: Tensor
    group: int

    @property
    def nbytes(self) -> int:
        return int(self.levels_OH.nbytes + self.scales_OG.nbytes)


def round_weight(weight_OH: Tensor, group: int) -> RoundedWeight:
    """weight = level · scale, rounded to the nearest; 16 MiB of fp32 copies at a time.

    `group` 0 is int8 with one scale for an output, else int4 with one for so many inputs, rounded
    to fp16 first; the last group may be smaller. An int4 scale has the sign that makes the largest
    number level -8: [0.8 -0.3 0.76 0] has the scale -0.1 and the levels [-8 3 -8 0].
    """
    rows = max(1, ROUNDED_AT_ONCE // weight_OH.shape[1])
    parts = [round_outputs(part, group) for part in weight_OH.detach().split(rows)]
    levels, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return RoundedWeight(levels, scales, group)


def round_outputs(weight_OH: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(levels, scales) of some outputs."""
    inputs = weight_OH.shape[1]
    size, (least, most) = (group, LEVELS["int4"]) if group else (inputs, LEVELS["int8"])
    weight = functional.pad(weight_OH.float(), (0, -inputs % size)).unflatten(1, (-1, size))
    scale = extremes(weight) / least if group else weight.abs().amax(-1) / most
    if group:
        scale = scale.half().float()
    levels = (weight / scale[..., None]).nan_to_num(0, 0, 0).round().clamp(least, most)
    return levels.to(torch.int8).flatten(1)[:, :inputs].contiguous(), scale


def extremes(weight_OGI: Tensor) -> Tensor:
    """(O, G): the largest number of each group by size; of two as large the negative one."""
    least, most = weight_OGI.aminmax(dim=-1)
    size = weight_OGI.abs().amax(-1)
    return torch.where(most > -least, size, -size)


def round_rows(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """(levels (T, H) in int8, fp32 scales (T)): x = level · scale, ties to even.

    [0.5 -2.54 0] has the scale 0.02 and the levels [25 -127 0]. A row of zeros has the scale 0; one
    with a number that is not finite has the scale NaN, so that its products show it.
    """
    x = x_TH.float()
    most_T = x.abs().amax(-1)
    counts_T = most_T.isfinite() & (most_T > SMALLEST_ROW)
    # 127 / most_T is torch's reciprocal, rounded twice
    inverse_T = torch.where(counts_T, torch.full_like(most_T, 127) / most_T, 0)
    levels = (x * inverse_T[:, None]).nan_to_num(0, 0, 0).round()
    scales_T = torch.where(counts_T, most_T / 127, 0)
    scales_T = torch.where(most_T.isfinite(), scales_T, float("nan"))
    return levels.to(torch.int8), scales_T
