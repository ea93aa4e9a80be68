"""Outliers kept (SpQR, Dettmers et al. 2023): a few single weights stay, the rest has fine steps.

    weight = level · scale + kept      [0.1 -0.2 9.0 0.2] of which one is kept: the largest number
                                       of the rest is 0.2, not 9

They are chosen by what rounding without them would lose. No kernel multiplies them yet: files do
not hold them.

O outputs, I inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.compress.gptq import gptq_keeping
from headway.compress.grid import GridRule, grid_for
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """Levels of all weights but a few, which are zero there; and those few, (K) each."""

    rounded: RoundedWeight
    outputs_K: Tensor
    inputs_K: Tensor
    values_K: Tensor

    def plain(self) -> Tensor:
        """fp32 (O, I)."""
        weight_OI = self.rounded.plain()
        weight_OI[self.outputs_K, self.inputs_K] = self.values_K
        return weight_OI

    @property
    def share(self) -> float:
        return len(self.values_K) / self.rounded.levels_OH.numel()


def keep_outliers(
    weight_OI: Tensor, hessian_II: Tensor | None, format: Format, rule: GridRule, share: float
) -> KeptWeight:
    """The `share` of weights with the largest w² · H are kept, the rest is rounded without them.

    Of two weights as large the one stays whose input is larger; without statistics the size alone
    decides.
    """
    weight = weight_OI.float()
    salience = weight.square()
    if hessian_II is not None:
        salience = salience * hessian_II.diagonal().clamp(min=1e-12)
    count = int(share * weight.numel())
    places_K = salience.flatten().topk(count).indices
    outputs_K, inputs_K = places_K // weight.shape[1], places_K % weight.shape[1]
    rest, kept_OI = weight.clone(), torch.zeros(weight.shape, dtype=torch.bool)
    rest[outputs_K, inputs_K] = 0
    kept_OI[outputs_K, inputs_K] = True
    importance = None if hessian_II is None else hessian_II.diagonal()
    grid = grid_for(rest, format, rule, importance)
    if hessian_II is None:
        rounded, values_OI = grid.nearest(rest), weight
    else:
        rounded, values_OI = gptq_keeping(weight, hessian_II, grid, kept_OI)
    return KeptWeight(rounded, outputs_K, inputs_K, values_OI[outputs_K, inputs_K])
