"""What a linear layer is given: the second moments of its inputs, their means and extremes.

Hooks on the linear layers of one layer count while rows run through it; then the layer is let go.
The parts of a fused matrix (q, k and v) read the same inputs and share one entry, experts have one
each.

T tokens, I inputs of a linear layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.compress.rows import product
from headway.runtime.experts import ExpertLinear
from headway.runtime.layers import Linear

COLUMNS_AT_ONCE = 1024
"""Of a wide Σ xxᵀ only the upper triangle is summed, in stripes of so many rows."""
MIN_SIZE = 1e-12
"""Root mean square of a token's inputs below which they are as good as zero."""
EXACT_TOKENS = 1 << 20
"""Beyond so many tokens sums are kept in fp64."""


@dataclass(slots=True)
class Moments:
    """Sums over the tokens that one matrix has read.

    With `normalized`, Σ xxᵀ is of x over its root mean square: a token counts as any other. A
    sequence's first token may be many times as large as the others ("Massive activations in large
    language models", Sun et al. 2024), and would be all that is fitted.
    """

    inputs: int
    normalized: bool = False
    count: int = 0
    outer_II: Tensor = field(init=False)
    amax_I: Tensor = field(init=False)
    size_I: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.outer_II = torch.zeros(self.inputs, self.inputs)
        self.amax_I, self.size_I = torch.zeros(self.inputs), torch.zeros(self.inputs)

    def add(self, x_TI: Tensor) -> None:
        """Count these tokens; one that is not finite is left out."""
        x = x_TI.detach().float()
        x = x[torch.isfinite(x).all(-1)]
        if not len(x):
            return
        self.count += len(x)
        counted = x
        if self.normalized:
            counted = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(MIN_SIZE)
        x_IT = counted.T.contiguous()
        if self.count > EXACT_TOKENS and self.outer_II.dtype != torch.float64:
            self.outer_II = self.outer_II.double()
        for begin in range(0, self.inputs, COLUMNS_AT_ONCE):
            stripe = self.outer_II[begin : begin + COLUMNS_AT_ONCE, begin:]
            stripe += product(x_IT[begin : begin + COLUMNS_AT_ONCE], x_IT[begin:])
        self.amax_I = torch.maximum(self.amax_I, x.abs().amax(0))
        self.size_I += x.abs().sum(0)

    @property
    def mean_size(self) -> Tensor:
        """Mean |x| of each input."""
        return self.size_I / max(self.count, 1)

    def rescale(self, scale_I: Tensor) -> None:
        """The moments of inputs divided by `scale_I`, in place."""
        self.outer_II /= scale_I[:, None] * scale_I
        self.amax_I /= scale_I
        self.size_I /= scale_I

    def hessian(self) -> Tensor:
        """Σ xxᵀ / T, whole, fp32 (I, I)."""
        upper = torch.triu(self.outer_II)
        whole = upper + torch.triu(self.outer_II, 1).T
        return (whole / max(self.count, 1)).float()


Place = tuple[str, int | None]
"""A linear layer within its layer, and the expert of it: ("mlp.down", None)."""


@contextmanager
def counting(layer: nn.Module, normalized: bool = False) -> Iterator[dict[Place, Moments]]:
    """Moments of all linear layers inside `layer`, filled by what runs through it meanwhile."""
    found: dict[Place, Moments] = {}
    handles = []
    for name, module in layer.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            handles.append(
                module.register_forward_pre_hook(partial(count, found, name, normalized))
            )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def count(
    found: dict[Place, Moments],
    name: str,
    normalized: bool,
    module: nn.Module,
    arguments: tuple[Any, ...],
) -> None:
    """One call of a linear layer: (x) or, of experts, (x, expert)."""
    x_TI, *expert = arguments
    place = (name, expert[0] if expert else None)
    if place not in found:
        found[place] = Moments(x_TI.shape[1], normalized)
    found[place].add(x_TI)
