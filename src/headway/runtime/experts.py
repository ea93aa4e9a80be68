"""A sparse MLP: each token visits a few of many experts (Shazeer et al. 2017), grouped by expert.

Worked example, 3 tokens, 2 of 4 experts each: the router picks [2 0] [1 2] [2 3]. Sorted by expert
the six visits are 0: t0, 1: t1, 2: t0 t1 t2, 3: t2; each expert that was hit multiplies its rows
once, and the rows go back to their tokens in the order the router ranked them, so that a sum never
depends on who else was in the batch. Experts that nobody visits are not read.

T tokens, H hidden size, E experts, K visited by a token, V = T · K visits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.runtime.kernels import reference
from headway.runtime.kernels.parts import Parts, num_bytes, pack_parts
from headway.runtime.layers import Build, Linear, Step
from headway.runtime.rounding import RoundedWeight


class ExpertLinear(nn.Module):
    """One linear layer for each of E experts, weights (E, outputs, inputs)."""

    def __init__(
        self,
        build: Build,
        count: int,
        inputs: int,
        outputs: int,
        parts: Sequence[int] = (),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.bias = build.weight(count, outputs) if bias else None
        self.parts = tuple(parts) or (outputs,)
        self.weight: nn.Parameter | None = build.weight(count, outputs, inputs)
        self.kernel = build.kernels.linear
        self.prepared: list[Any] = []
        self.packed = False

    def prepare(self) -> None:
        """Bring every expert's weight into the kernel's form; one not read any more is let go."""
        assert self.weight is not None
        matrices = list(self.weight)
        self.prepared = [self.kernel.prepare(matrix) for matrix in matrices]
        self.packed = self.prepared[0] is not matrices[0]
        if self.packed and not self.kernel.few_rows:
            self.weight = None

    def take(self, experts: Sequence[Sequence[RoundedWeight | None]]) -> None:
        """The same with matrices that a checkpoint holds rounded: the parts of each expert.

        None: the rows in its `weight`, plain.
        """
        assert self.weight is not None and len(experts) == len(self.weight)
        self.prepared = []
        for parts, weight in zip(experts, self.weight, strict=True):
            rows = zip(parts, weight.split(self.parts), strict=True)
            given = [plain if part is None else part for part, plain in rows]
            self.prepared.append(pack_parts(self.kernel, given, self.parts))
        self.packed, self.weight = True, None

    def restore(self, prepared: list[Any]) -> None:
        """Take weights that were prepared before, in place of `prepare`."""
        self.prepared, self.packed, self.weight = prepared, True, None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of every expert's matrix, before they are prepared."""
        assert self.weight is not None
        count, outputs, inputs = self.weight.shape
        return [(outputs, inputs)] * count

    @property
    def matrices(self) -> list[Any]:
        """The prepared matrices."""
        flat = [one.matrices if isinstance(one, Parts) else [one] for one in self.prepared]
        return [matrix for one in flat for matrix in one]

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the prepared weights beside the plain ones."""
        if not self.packed:
            return 0
        return sum(num_bytes(weight) for weight in self.prepared)

    def forward(self, x_TH: Tensor, expert: int) -> Tensor:
        bias_O = None if self.bias is None else self.bias[expert]
        if x_TH.shape[0] <= self.kernel.few_rows:
            assert self.weight is not None
            return reference.linear(x_TH, self.weight[expert], bias_O)
        return self.kernel(x_TH, self.prepared[expert], bias_O)


class SparseMLP(nn.Module):
    """A router and its experts, each a gated MLP."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec, experts = build.spec, build.spec.experts
        assert experts is not None
        self.active, self.normalize = experts.active, experts.normalize
        self.count = experts.count
        self.router = Linear(build, spec.hidden_size, experts.count, bias=experts.biased)
        inner = experts.intermediate_size
        hidden, count = spec.hidden_size, experts.count
        self.gate_up = ExpertLinear(build, count, hidden, 2 * inner, (inner, inner), experts.biased)
        self.down = ExpertLinear(build, count, inner, hidden, bias=experts.biased)
        self.gated = build.kernels.gated[spec.activation]
        if spec.swiglu_limit:
            limit, alpha = spec.swiglu_limit, spec.swiglu_alpha
            self.gated = partial(reference.clamped_silu_mul, limit=limit, alpha=alpha)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        weights_TK, experts_TK = self.route(x_TH)
        visits_V = experts_TK.flatten().argsort(stable=True)
        rows_VH = x_TH[visits_V // self.active]
        out_VH = torch.empty_like(rows_VH)
        counts = experts_TK.flatten().bincount(minlength=self.count).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                end = begin + count
                inner = self.gated(self.gate_up(rows_VH[begin:end], expert))
                out_VH[visits_V[begin:end]] = self.down(inner, expert)
                begin = end
                step.experts_read += 1
        return (out_VH.unflatten(0, (-1, self.active)) * weights_TK[..., None]).sum(1)

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) of each token's visits, likeliest first, both (T, K)."""
        shares_TE = self.router(x_TH).float().softmax(-1)
        weights_TK, experts_TK = shares_TE.topk(self.active, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK.to(x_TH.dtype), experts_TK
