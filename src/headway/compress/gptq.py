"""GPTQ (Frantar et al. 2022): what rounding one input spoils, the inputs after it make good.

Inputs are rounded one by one, those of the largest squares first; the error of each is spread over
those not rounded yet, as their correlations say. Scales are fixed beforehand, in the places of the
file, so that the order leaves no trace in it. Worked example, two inputs of the same values,
H = [[1 1] [1 1]], scale 1, weights [0.4 0.4]: to the nearest [0 0], which loses 0.8; here the first
becomes 0, the second 0.4 + 0.4 → 1, which loses 0.2.

O outputs, I inputs.
"""

import torch
from torch import Tensor

from headway.compress.grid import Grid
from headway.runtime.rounding import RoundedWeight

BLOCK = 128
"""Inputs whose errors are spread within before they go on to all others."""
DAMPING = 0.01
"""Share of the mean square that is added to every input's own."""
MOST_DAMPING = 10.0


def gptq(
    weight_OI: Tensor,
    hessian_II: Tensor,
    grid: Grid,
    *,
    by_activation: bool = True,
    damping: float = DAMPING,
) -> RoundedWeight:
    """Levels of `weight_OI` on `grid` for inputs with the second moments `hessian_II`.

    Inputs that were never seen are rounded to the nearest, as all are where nothing correlates.
    """
    return gptq_keeping(weight_OI, hessian_II, grid, None, by_activation, damping)[0]


def gptq_keeping(
    weight_OI: Tensor,
    hessian_II: Tensor,
    grid: Grid,
    kept_OI: Tensor | None,
    by_activation: bool = True,
    damping: float = DAMPING,
) -> tuple[RoundedWeight, Tensor]:
    """(levels, the weights as they were when their turn came, (O, I)).

    Those in the mask `kept_OI` lose nothing: their levels are zero, their values are the second.
    """
    inputs = weight_OI.shape[1]
    diagonal = hessian_II.diagonal()
    order = torch.arange(inputs)
    if by_activation:
        order = torch.argsort(diagonal, descending=True, stable=True)
    factor_II = inverse_factor(hessian_II[order][:, order], damping)
    weight = weight_OI.float()[:, order].contiguous()
    scales = grid.columns(inputs)[:, order]
    kept = None if kept_OI is None else kept_OI[:, order]
    levels = torch.empty(weight.shape, dtype=torch.int8)
    for begin in range(0, inputs, BLOCK):
        now = slice(begin, min(begin + BLOCK, inputs))
        masked = None if kept is None else kept[:, now]
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
    kept_OB: Tensor | None,
) -> Tensor:
    """Round the inputs of a block in turn, into `levels_OB`; returns their errors, (O, B).

    `weight_OB` is changed on the way. Transposed, so that an input's weights lie together.
    """
    weight_BO, scales_BO = weight_OB.T.contiguous(), scales_OB.T.contiguous()
    rounded_BO = torch.empty_like(weight_BO)
    errors_BO = torch.empty_like(weight_BO)
    for i, own in enumerate(factor_BB.diagonal().tolist()):
        value, scale = weight_BO[i], scales_BO[i]
        level = (value / scale).nan_to_num_(0, 0, 0).round_().clamp_(grid.least, grid.most)
        error = (value - level * scale) / own
        if kept_OB is not None:
            level, error = (x.masked_fill_(kept_OB[:, i], 0) for x in (level, error))
        rounded_BO[i], errors_BO[i] = level, error
        if i + 1 < len(weight_BO):
            weight_BO[i + 1 :].addr_(factor_BB[i, i + 1 :], error, alpha=-1)
    levels_OB.copy_(rounded_BO.T)
    weight_OB.copy_(weight_BO.T)
    return errors_BO.T


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Upper triangular U with UᵀU = H⁻¹; more damping where H cannot be inverted otherwise."""
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
        assert share <= MOST_DAMPING, "a matrix of second moments has no inverse"
        share = max(share * 10, 1e-4)
