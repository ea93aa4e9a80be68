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

PENDING = 64
"""Rows whose parts of H⁻¹ are subtracted together."""


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
    inverse = Inverse(factor.T @ factor)
    here = torch.ones(units, dtype=torch.bool)
    left = [count] * classes
    for _ in range(count * classes):
        open_units = here & torch.tensor(left).repeat_interleave(units // classes).bool()
        unit = int(costs(weight, inverse, size).masked_fill(~open_units, torch.inf).argmin())
        inverse.take_out(weight, slice(unit * size, (unit + 1) * size))
        here[unit] = False
        left[unit // (units // classes)] -= 1
    gone = (~here).repeat_interleave(size)
    weight[:, gone] = 0.0
    return here.nonzero().flatten(), weight


class Inverse:
    """H⁻¹ of the inputs that are left.

    What units take from it is kept as pairs of factors, and subtracted as one product when PENDING
    rows of them have come: of 4,864 inputs every unit alone would read and write 190 MB.
    """

    def __init__(self, inverse_II: Tensor) -> None:
        self._inverse_II = inverse_II
        self._rows = torch.empty(0, len(inverse_II))
        self._solved = torch.empty(0, len(inverse_II))
        self.diagonal_I = inverse_II.diagonal().clone()

    def rows(self, unit: slice) -> Tensor:
        """(D, I) of H⁻¹ as it is now."""
        found: Tensor = self._inverse_II[unit] - self._rows[:, unit].T @ self._solved
        return found

    def blocks(self, size: int) -> Tensor:
        """(U, D, D) on its diagonal."""
        self._settle()
        starts = range(0, len(self._inverse_II), size)
        return torch.stack([self._inverse_II[i : i + size, i : i + size] for i in starts])

    def take_out(self, weight_OI: Tensor, unit: slice) -> None:
        """Spread a unit's part of the weights over the inputs left, in place, and forget it."""
        rows_DI = self.rows(unit)
        solved_DI = torch.linalg.pinv(rows_DI[:, unit], hermitian=True) @ rows_DI
        weight_OI -= weight_OI[:, unit] @ solved_DI
        weight_OI[:, unit] = 0.0
        self.diagonal_I -= (rows_DI * solved_DI).sum(0)
        self._rows = torch.cat([self._rows, rows_DI])
        self._solved = torch.cat([self._solved, solved_DI])
        if len(self._rows) >= PENDING:
            self._settle()

    def _settle(self) -> None:
        self._inverse_II -= self._rows.T @ self._solved
        self._rows, self._solved = self._rows[:0], self._solved[:0]


def costs(weight_OI: Tensor, inverse: Inverse, size: int) -> Tensor:
    """How far the outputs move without each unit, squared: tr(W_S (H⁻¹_SS)⁻¹ W_Sᵀ), (U)."""
    if size == 1:
        return weight_OI.square().sum(0) / inverse.diagonal_I.clamp(min=1e-30)
    weight_UOD = weight_OI.view(len(weight_OI), -1, size).transpose(0, 1)
    solved = weight_UOD @ torch.linalg.pinv(inverse.blocks(size), hermitian=True)
    found: Tensor = (solved * weight_UOD).sum((1, 2))
    return found
