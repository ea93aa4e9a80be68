"""Removal of whole inputs of a matrix, with compensation by the remaining ones.

An MLP's neurons are the inputs of its `down`, a head's dimensions those of attention's `out`. Units
are removed in the order of the change of the outputs after compensation (the optimal brain surgeon
of Hassibi and Stork, 1992, for groups as in ZipLM, Kurtic et al. 2023); each removal is judged on
what the ones before it leave.

    two equal neurons, columns 0.4 and 0.6 → one with 1.0, without a loss

O outputs, I inputs, U units of D inputs each, H = Σ xxᵀ / T.
"""

import torch
from torch import Tensor

from headway.compress.gptq import DAMPING, inverse_factor

PENDING_ROWS = 64
"""Rows whose parts of H⁻¹ are subtracted together."""


def remove_units(
    weight_OI: Tensor, hessian_II: Tensor, size: int, count: int, classes: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (remaining units, in order; weights (O, I) with the others' columns at zero).

    A unit is `size` adjacent inputs. Units are in `classes` consecutive groups of equal size, and
    `count` of each group are removed.
    """
    weight = weight_OI.float().clone()
    units = weight.shape[1] // size
    weight[:, hessian_II.diagonal() <= 0] = 0.0  # never active: nothing is missed
    factor = inverse_factor(hessian_II, DAMPING)
    inverse = Inverse(factor.T @ factor)
    remaining = torch.ones(units, dtype=torch.bool)
    budget = [count] * classes
    for _ in range(count * classes):
        open_units = remaining & torch.tensor(budget).repeat_interleave(units // classes).bool()
        unit = int(costs(weight, inverse, size).masked_fill(~open_units, torch.inf).argmin())
        inverse.remove(weight, slice(unit * size, (unit + 1) * size))
        remaining[unit] = False
        budget[unit // (units // classes)] -= 1
    gone = (~remaining).repeat_interleave(size)
    weight[:, gone] = 0.0
    return remaining.nonzero().flatten(), weight


class Inverse:
    """H⁻¹ of the remaining inputs.

    The updates of removed units are kept as pairs of factors and subtracted as one product after
    PENDING_ROWS rows: with 4,864 inputs, a separate update would read and write 190 MB per unit.
    """

    def __init__(self, inverse_II: Tensor) -> None:
        self._inverse_II = inverse_II
        self._rows = torch.empty(0, len(inverse_II))
        self._solved = torch.empty(0, len(inverse_II))
        self.diagonal_I = inverse_II.diagonal().clone()

    def rows(self, unit: slice) -> Tensor:
        """Return the current (D, I) rows of H⁻¹."""
        rows_DI: Tensor = self._inverse_II[unit] - self._rows[:, unit].T @ self._solved
        return rows_DI

    def blocks(self, size: int) -> Tensor:
        """Return its diagonal blocks, (U, D, D)."""
        self._apply_updates()
        starts = range(0, len(self._inverse_II), size)
        return torch.stack([self._inverse_II[i : i + size, i : i + size] for i in starts])

    def remove(self, weight_OI: Tensor, unit: slice) -> None:
        """Distribute a unit's weights over the remaining inputs, in place, and drop it."""
        rows_DI = self.rows(unit)
        solved_DI = torch.linalg.pinv(rows_DI[:, unit], hermitian=True) @ rows_DI
        weight_OI -= weight_OI[:, unit] @ solved_DI
        weight_OI[:, unit] = 0.0
        self.diagonal_I -= (rows_DI * solved_DI).sum(0)
        self._rows = torch.cat([self._rows, rows_DI])
        self._solved = torch.cat([self._solved, solved_DI])
        if len(self._rows) >= PENDING_ROWS:
            self._apply_updates()

    def _apply_updates(self) -> None:
        self._inverse_II -= self._rows.T @ self._solved
        self._rows, self._solved = self._rows[:0], self._solved[:0]


def costs(weight_OI: Tensor, inverse: Inverse, size: int) -> Tensor:
    """Return the squared output change without each unit, tr(W_S (H⁻¹_SS)⁻¹ W_Sᵀ), (U)."""
    if size == 1:
        return weight_OI.square().sum(0) / inverse.diagonal_I.clamp(min=1e-30)
    weight_UOD = weight_OI.view(len(weight_OI), -1, size).transpose(0, 1)
    solved = weight_UOD @ torch.linalg.pinv(inverse.blocks(size), hermitian=True)
    costs_U: Tensor = (solved * weight_UOD).sum((1, 2))
    return costs_U
