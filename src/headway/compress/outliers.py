"""Outliers (SpQR, Dettmers et al. 2023): a few weights stay exact, the rest has finer steps.

weight = level · scale + outlier   [0.1 -0.2 9.0 0.2] with one outlier: the largest number of the
rest is 0.2, not 9

Outliers are the weights with the largest rounding loss. No kernel multiplies them yet, so no file
format contains them.

O outputs, I inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.compress.gptq import gptq_with_outliers
from headway.compress.grid import GridRule, grid_for
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True)
class OutlierWeight:
    """Levels of all weights, zero at the outliers; and K outliers with their positions."""

    rounded: RoundedWeight
    outputs_K: Tensor
    inputs_K: Tensor
    values_K: Tensor

    def plain(self) -> Tensor:
        """Return the weight in fp32, (O, I)."""
        weight_OI = self.rounded.plain()
        weight_OI[self.outputs_K, self.inputs_K] = self.values_K
        return weight_OI

    @property
    def share(self) -> float:
        return len(self.values_K) / self.rounded.levels_OH.numel()


def keep_outliers(
    weight_OI: Tensor, hessian_II: Tensor | None, format: Format, rule: GridRule, share: float
) -> OutlierWeight:
    """Keep the `share` of weights with the largest w² · diag(H) exact, and round the rest.

    Without statistics the magnitude alone decides.
    """
    weight = weight_OI.float()
    salience = weight.square()
    if hessian_II is not None:
        salience = salience * hessian_II.diagonal().clamp(min=1e-12)
    count = int(share * weight.numel())
    places_K = salience.flatten().topk(count).indices
    outputs_K, inputs_K = places_K // weight.shape[1], places_K % weight.shape[1]
    rest, outliers_OI = weight.clone(), torch.zeros(weight.shape, dtype=torch.bool)
    rest[outputs_K, inputs_K] = 0
    outliers_OI[outputs_K, inputs_K] = True
    importance = None if hessian_II is None else hessian_II.diagonal()
    grid = grid_for(rest, format, rule, importance)
    if hessian_II is None:
        rounded, values_OI = grid.nearest(rest), weight
    else:
        rounded, values_OI = gptq_with_outliers(weight, hessian_II, grid, outliers_OI)
    return OutlierWeight(rounded, outputs_K, inputs_K, values_OI[outputs_K, inputs_K])
