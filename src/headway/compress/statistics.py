"""Input statistics of linear layers: second moments, means and extremes.

Forward hooks on the linear layers of one layer collect them while rows run through it. The parts of
a fused matrix (q, k and v) read the same inputs and share an entry; each expert has its own.

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
"""Rows of a stripe: only the upper triangle of Σ xxᵀ is summed, in stripes."""
MIN_RMS = 1e-12
"""Root mean square of a token's inputs that counts as zero."""
EXACT_TOKENS = 1 << 20
"""Number of tokens above which sums are in fp64."""


@dataclass(slots=True)
class Moments:
    """Sums over the tokens that one matrix has read.

    With `normalized`, Σ xxᵀ is of x over its root mean square, so that all tokens have equal
    weight: the first token of a sequence may be many times as large as the others ("Massive
    activations in large language models", Sun et al. 2024) and would otherwise determine the fit.
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
        """Add these tokens; tokens that are not finite are skipped."""
        x = x_TI.detach().float()
        x = x[torch.isfinite(x).all(-1)]
        if not len(x):
            return
        self.count += len(x)
        counted = x
        if self.normalized:
            counted = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(MIN_RMS)
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
        """Adapt the moments to inputs divided by `scale_I`, in place."""
        self.outer_II /= scale_I[:, None] * scale_I
        self.amax_I /= scale_I
        self.size_I /= scale_I

    def hessian(self) -> Tensor:
        """Return the full Σ xxᵀ / T, fp32 (I, I)."""
        upper = torch.triu(self.outer_II)
        whole = upper + torch.triu(self.outer_II, 1).T
        return (whole / max(self.count, 1)).float()


Place = tuple[str, int | None]
"""A linear layer within its layer, and its expert: ("mlp.down", None)."""


@contextmanager
def collect_moments(layer: nn.Module, normalized: bool = False) -> Iterator[dict[Place, Moments]]:
    """Collect moments of all linear layers in `layer` during the block."""
    moments: dict[Place, Moments] = {}
    handles = []
    for name, module in layer.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            handles.append(
                module.register_forward_pre_hook(partial(add_call, moments, name, normalized))
            )
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def add_call(
    moments: dict[Place, Moments],
    name: str,
    normalized: bool,
    module: nn.Module,
    arguments: tuple[Any, ...],
) -> None:
    """Add one call of a linear layer: (x) or, for experts, (x, expert)."""
    x_TI, *expert = arguments
    place = (name, expert[0] if expert else None)
    if place not in moments:
        moments[place] = Moments(x_TI.shape[1], normalized)
    moments[place].add(x_TI)
