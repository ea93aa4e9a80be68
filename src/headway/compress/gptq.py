"""GPTQ (Frantar et al. 2022): the remaining inputs compensate the error of each rounded input.

Inputs are rounded one by one in falling order of their mean squares; the error of each is spread
over the inputs that are not rounded yet, by their correlations. Scales are fixed before, in the
order of the file, so that the file does not depend on this order. Example: two inputs with equal
values, H = [[1 1] [1 1]], scale 1, weights [0.4 0.4]. Rounding to the nearest gives [0 0], an error
of 0.8; GPTQ rounds the first to 0 and the second, 0.4 + 0.4, to 1, an error of 0.2.

O outputs, I inputs.
"""

import torch
from torch import Tensor

from headway.compress.grid import Grid
from headway.runtime.rounding import RoundedWeight

BLOCK = 128
"""Inputs whose errors are spread within the block before they go to all others."""
DAMPING = 0.01
"""Fraction of the mean square that is added to the diagonal."""
MAX_DAMPING = 10.0


def gptq(
    weight_OI: Tensor,
    hessian_II: Tensor,
    grid: Grid,
    *,
    by_activation: bool = True,
    damping: float = DAMPING,
) -> RoundedWeight:
    """Round `weight_OI` to levels of `grid` for inputs with the second moments `hessian_II`.

    Inputs without data are rounded to the nearest level, as are all if no inputs correlate.
    """
    return gptq_with_outliers(weight_OI, hessian_II, grid, None, by_activation, damping)[0]


def gptq_with_outliers(
    weight_OI: Tensor,
    hessian_II: Tensor,
    grid: Grid,
    outliers_OI: Tensor | None,
    by_activation: bool = True,
    damping: float = DAMPING,
) -> tuple[RoundedWeight, Tensor]:
    """Return the levels, and the weights just before each was rounded, (O, I).

    Weights in the mask `outliers_OI` are not rounded: their levels are zero, and their values are
    in the second tensor.
    """
    inputs = weight_OI.shape[1]
    diagonal = hessian_II.diagonal()
    order = torch.arange(inputs)
    if by_activation:
        order = torch.argsort(diagonal, descending=True, stable=True)
    factor_II = inverse_factor(hessian_II[order][:, order], damping)
    weight = weight_OI.float()[:, order].contiguous()
    scales = grid.columns(inputs)[:, order]
    outliers = None if outliers_OI is None else outliers_OI[:, order]
    levels = torch.empty(weight.shape, dtype=torch.int8)
    for begin in range(0, inputs, BLOCK):
        now = slice(begin, min(begin + BLOCK, inputs))
        masked = None if outliers is None else outliers[:, now]
        errors = round_block(
            weight[:, now], scales[:, now], factor_II[now, now], grid, levels[:, now], masked
        )
        weight[:, now.stop :] -= errors @ factor_II[now, now.stop :]
    back = torch.argsort(order)
    rounded = RoundedWeight(levels[:, back].contiguous(), grid.scales_OG, grid.size)
    return rounded, weight[:, back]


def round_block(
    weight_OB: Tensor,
    scales_OB: Tensor,
    factor_BB: Tensor,
    grid: Grid,
    levels_OB: Tensor,
    outliers_OB: Tensor | None,
) -> Tensor:
    """Round the inputs of a block in turn into `levels_OB`; return their errors, (O, B).

    `weight_OB` is modified. The loop is over the transposed block, where an input's weights are
    adjacent.
    """
    weight_BO, scales_BO = weight_OB.T.contiguous(), scales_OB.T.contiguous()
    rounded_BO = torch.empty_like(weight_BO)
    errors_BO = torch.empty_like(weight_BO)
    for i, own in enumerate(factor_BB.diagonal().tolist()):
        value, scale = weight_BO[i], scales_BO[i]
        level = (value / scale).nan_to_num_(0, 0, 0).round_().clamp_(grid.min_level, grid.max_level)
        error = (value - level * scale) / own
        if outliers_OB is not None:
            level, error = (x.masked_fill_(outliers_OB[:, i], 0) for x in (level, error))
        rounded_BO[i], errors_BO[i] = level, error
        if i + 1 < len(weight_BO):
            weight_BO[i + 1 :].addr_(factor_BB[i, i + 1 :], error, alpha=-1)
    levels_OB.copy_(rounded_BO.T)
    weight_OB.copy_(weight_BO.T)
    return errors_BO.T


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Return upper triangular U with UᵀU = H⁻¹; damping grows until H can be inverted."""
    mean = hessian_II.diagonal().mean().item()
    damped = hessian_II.clone()
    dead = damped.diagonal() <= 0
    damped[dead], damped[:, dead] = 0, 0
    damped.diagonal()[dead] = mean or 1.0
    share = damping
    while True:
        trial = damped.clone()
        trial.diagonal().add_(share * mean)
        factor, wrong = torch.linalg.cholesky_ex(trial)
        if not wrong:
            upper: Tensor
            upper, wrong = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not wrong and torch.isfinite(upper).all():
                return upper
        assert share <= MAX_DAMPING, "a matrix of second moments has no inverse"
        share = max(share * 10, 1e-4)
