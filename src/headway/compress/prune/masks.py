"""Pruning of single weights: SparseGPT, Wanda, magnitude.

Example: one output of two equal inputs, weights [0.4 0.6], half of them to remove. Magnitude leaves
[0 0.6], so the output is 0.6x instead of x; SparseGPT (Frantar and Alistarh 2023) moves the removed
weight to the remaining one, [0 1.0]. Wanda (Sun et al. 2023) selects by |weight| · ‖input‖ within
each output and changes no other weight.

O outputs, I inputs, H = Σ xxᵀ / T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.compress.gptq import BLOCK, DAMPING, inverse_factor


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which zeros: `share` of all weights, or `zeros` of every `of` adjacent ones (2 of 4)."""

    share: float
    zeros: int = 0
    of: int = 0

    def __str__(self) -> str:
        return f"{self.zeros}:{self.of}" if self.of else f"{self.share:.0%} of the weights"


TWO_OF_FOUR = Pattern(0.5, 2, 4)


def magnitude(weight_OI: Tensor, hessian_II: Tensor, pattern: Pattern) -> Tensor:
    """Zero the smallest weights of each output; inputs are ignored."""
    return weight_OI.masked_fill(smallest(weight_OI.abs(), pattern), 0.0)


def wanda(weight_OI: Tensor, hessian_II: Tensor, pattern: Pattern) -> Tensor:
    """Zero the weights that individually change their output least."""
    sizes_I = hessian_II.diagonal().clamp(min=0).sqrt()
    return weight_OI.masked_fill(smallest(weight_OI.abs() * sizes_I, pattern), 0.0)


def sparsegpt(weight_OI: Tensor, hessian_II: Tensor, pattern: Pattern) -> Tensor:
    """Zero weights input by input, and compensate with the inputs after them.

    In each block of 128 inputs the same share is removed, over all outputs together.
    """
    factor_II = inverse_factor(hessian_II, DAMPING)
    weight = weight_OI.float().clone()
    for begin in range(0, weight.shape[1], BLOCK):
        end = min(begin + BLOCK, weight.shape[1])
        errors = prune_block(weight[:, begin:end], factor_II[begin:end, begin:end], pattern)
        weight[:, end:] -= errors @ factor_II[begin:end, end:]
    return weight


def prune_block(weight_OB: Tensor, factor_BB: Tensor, pattern: Pattern) -> Tensor:
    """Zero a part of a block in place; return each input's errors for the later blocks, (O, B).

    An input's error over its entry of the factor is what the later inputs must compensate.
    """
    own_B = factor_BB.diagonal()
    errors_OB = torch.zeros_like(weight_OB)
    gone_OB = torch.zeros_like(weight_OB, dtype=torch.bool)
    if not pattern.of:
        gone_OB = share_of_all((weight_OB / own_B).square(), pattern.share)
    for i in range(weight_OB.shape[1]):
        if pattern.of and i % pattern.of == 0:
            ahead = slice(i, i + pattern.of)
            gone_OB[:, ahead] = smallest((weight_OB[:, ahead] / own_B[ahead]).square(), pattern)
        errors_OB[:, i] = torch.where(gone_OB[:, i], weight_OB[:, i] / own_B[i], 0.0)
        weight_OB[:, i:] -= errors_OB[:, i, None] * factor_BB[i, i:]
        weight_OB[:, i].masked_fill_(gone_OB[:, i], 0.0)
    return errors_OB


def smallest(scores_OI: Tensor, pattern: Pattern) -> Tensor:
    """Return True for the smallest of each output, or of each group of adjacent weights."""
    if not pattern.of:
        return lowest(scores_OI, int(pattern.share * scores_OI.shape[1]))
    outputs, inputs = scores_OI.shape
    whole = inputs - inputs % pattern.of  # what is left over stays
    mask = torch.zeros_like(scores_OI, dtype=torch.bool)
    groups = scores_OI[:, :whole].reshape(outputs * (whole // pattern.of), pattern.of)
    mask[:, :whole] = lowest(groups, pattern.zeros).view(outputs, whole)
    return mask


def lowest(scores_RC: Tensor, count: int) -> Tensor:
    """Return True for the `count` lowest of each row; on ties the first."""
    chosen = scores_RC.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(scores_RC, dtype=torch.bool).scatter_(1, chosen, True)


def share_of_all(scores_OB: Tensor, share: float) -> Tensor:
    """Return True for the lowest share of all numbers."""
    return lowest(scores_OB.reshape(1, -1), int(share * scores_OB.numel())).view_as(scores_OB)


METHODS = {"sparsegpt": sparsegpt, "wanda": wanda, "magnitude": magnitude}
