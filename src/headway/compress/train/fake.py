"""Fake quantization for training: rounding with a straight-through gradient (Bengio et al. 2013).

The forward pass is that of serving: int4 levels -8 … 7 with a scale per group, or int8 by output;
scales that bf16 can store, as folders do; inputs in int8 by block. The backward pass treats
rounding as the identity, and also learns the scales (LSQ, Esser et al. 2020): a scale is its start
times e^t, so that a learning rate is relative.

    weight 0.26, scale 0.1 → level 3, forward 0.3; the gradient of 0.3 goes to 0.26 unchanged,
    and (3 - 2.6) of it to the scale

T tokens, H inputs, O outputs, G groups, I inputs of a group.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.runtime.rounding import LEVELS, RoundedWeight, dequantized_rows
from headway.spec.formats import Format


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` in the forward pass, with the gradient of `x`."""
    return x + (rounded - x).detach()


class FakeRounding(nn.Module):
    """The rounding of one linear layer; `group` 0 is int8 by output."""

    def __init__(self, start: RoundedWeight) -> None:
        super().__init__()
        self.group, self.format = start.group, start.format
        self.min_level, self.max_level = LEVELS["int4" if self.group else "int8"]
        self.start_OG: Tensor
        self.register_buffer("start_OG", start.scales_OG.clone().view(len(start.levels_OH), -1))
        self.stretch_OG = nn.Parameter(torch.zeros_like(self.start_OG))
        self.inputs = start.levels_OH.shape[1]

    def scales(self) -> Tensor:
        """Return the scales (O, G), rounded to bf16."""
        scales = self.start_OG * self.stretch_OG.exp()
        return straight(scales, scales.detach().bfloat16().float())

    def grouped(self, weight_OH: Tensor) -> Tensor:
        """Return the weight as (O, G, I), with the last group padded with zeros."""
        size = self.group or self.inputs
        padded = functional.pad(weight_OH, (0, -self.inputs % size))
        return padded.view(len(weight_OH), -1, size)

    def forward(self, x_TH: Tensor, weight_OH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputs, weight) as they will be multiplied."""
        scales = self.scales()[..., None]
        safe = torch.where(scales == 0, 1.0, scales)
        steps = (self.grouped(weight_OH) / safe).clamp(self.min_level, self.max_level)
        weight = straight(steps, steps.detach().round()) * scales
        return fake_inputs(x_TH, self.format), weight.flatten(1)[:, : self.inputs]

    @torch.no_grad()
    def rounded(self, weight_OH: Tensor) -> RoundedWeight:
        """Return the levels and scales that `forward` uses."""
        scales = self.scales()
        safe = torch.where(scales == 0, 1.0, scales)[..., None]
        levels = (self.grouped(weight_OH) / safe).round().clamp(self.min_level, self.max_level)
        levels = levels.to(torch.int8).flatten(1)[:, : self.inputs].contiguous()
        return RoundedWeight(levels, scales, self.group)


def fake_inputs(x_TH: Tensor, format: Format) -> Tensor:
    """Return inputs as a product with weights of `format` rounds them."""
    with torch.no_grad():
        rounded = dequantized_rows(x_TH, format)
    return straight(x_TH, rounded)
