"""Which inputs of a matrix can go altogether, and what the others make good.

An MLP's neurons are the inputs of its `down`, a head's dims those of attention's `out`. The unit
that is missed least goes first, by how far the matrix's outputs move once the others have made good
what they can (the optimal brain surgeon of Hassibi and Stork, 1992, for groups as in ZipLM, Kurtic
et al. 2023); the next is judged on what is left.

    two neurons that are always alike, columns 0.4 and 0.6 → one with 1.0, and nothing is lost

O outputs, I inputs, U units of D inputs each, H = Σ xxᵀ / T.
"""

import torch
from torch import Tensor

from headway.compress.gptq import DAMPING, inverse_factor


def remove_units(
    weight_OI: Tensor, hessian_II: Tensor, size: int, count: int, classes: int = 1
) -> tuple[Tensor, Tensor]:
    """(units that stay, in order; the weights (O, I) with the others' columns at zero).

    Units are `size` neighbouring inputs. They lie in as many classes as `classes` says, one behind
    the other, and `count` of each class go.
    """
    weight = weight_OI.float().clone()
    units = weight.shape[1] // size
    weight[:, hessian_II.diagonal() <= 0] = 0.0  # never active: nothing is missed
    factor = inverse_factor(hessian_II, DAMPING)
    inverse_II = factor.T @ factor
    here = torch.ones(units, dtype=torch.bool)
    left = [count] * classes
    for _ in range(count * classes):
        open_units = here & torch.tensor(left).repeat_interleave(units // classes).bool()
        unit = int(costs(weight, inverse_II, size).masked_fill(~open_units, torch.inf).argmin())
        take_out(weight, inverse_II, slice(unit * size, (unit + 1) * size))
        here[unit] = False
        left[unit // (units // classes)] -= 1
    gone = (~here).repeat_interleave(size)
    weight[:, gone] = 0.0
    return here.nonzero().flatten(), weight


def costs(weight_OI: Tensor, inverse_II: Tensor, size: int) -> Tensor:
    """How far the outputs move without each unit, squared: tr(W_S (H⁻¹_SS)⁻¹ W_Sᵀ), (U)."""
    if size == 1:
        return weight_OI.square().sum(0) / inverse_II.diagonal().clamp(min=1e-30)
    blocks = torch.stack([
        inverse_II[i : i + size, i : i + size] for i in range(0, len(inverse_II), size)
    ])  # fmt: skip
    weight_UOD = weight_OI.view(len(weight_OI), -1, size).transpose(0, 1)
    solved = weight_UOD @ torch.linalg.pinv(blocks, hermitian=True)
    found: Tensor = (solved * weight_UOD).sum((1, 2))
    return found


def take_out(weight_OI: Tensor, inverse_II: Tensor, unit: slice) -> None:
    """Spread a unit's part over the inputs that are left, in place, and forget the unit in H⁻¹."""
    rows = inverse_II[unit].clone()
    solved = torch.linalg.pinv(rows[:, unit], hermitian=True)
    weight_OI -= (weight_OI[:, unit] @ solved) @ rows
    inverse_II -= rows.T @ (solved @ rows)
    weight_OI[:, unit] = 0.0
    inverse_II[unit] = 0.0
    inverse_II[:, unit] = 0.0
    inverse_II.diagonal()[unit] = 1.0
