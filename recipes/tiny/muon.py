"""Muon: momentum made orthogonal, for the matrices of the layers.

It is given parameters of two dimensions, and gradients step by step.
It promises updates whose size is that of AdamW's, so that one learning rate serves both.
torch has the same optimizer, in bf16 throughout, which a CPU without bf16 takes seconds for.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are all about one.

    A quintic Newton-Schulz iteration of Jordan et al., "Muon: an optimizer for hidden layers"
    (2024): X becomes aX + (bA + cA²)X with A = XXᵀ. A singular value of 0.1 goes 0.34, 0.99, 0.70.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(Optimizer):
    """Nesterov momentum, orthogonal updates of root mean square 0.2, decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter, as W - lr (0.2 √max(rows, columns) O + decay W)."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                velocity = state["momentum"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonal(parameter.grad.lerp(velocity, momentum))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * max(parameter.shape) ** 0.5 * lr)
