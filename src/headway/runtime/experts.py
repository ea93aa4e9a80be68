"""A sparse MLP: each token visits a few of many experts (Shazeer et al. 2017).

Worked example, 3 tokens, 2 of 4 experts each: the router picks [2 0] [1 2] [2 3]. Sorted by expert
the six visits are 0: t0, 1: t1, 2: t0 t1 t2, 3: t2; each visited expert multiplies its rows once,
and the rows go back to their tokens in the order of the router's ranks. So a sum depends neither on
other requests of the batch nor on the ranks that hold the experts. Experts without visits are not
read. A GPU multiplies all experts in one product over tiles (`kernels.grouped`), and the host never
reads the router's choice.

T tokens, H hidden size, E experts, K visited by a token, V = T · K visits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.runtime.kernels import reference
from headway.runtime.kernels.grouped import GroupedLinear, Visits, visits_of
from headway.runtime.kernels.parts import Parts, num_bytes, pack_parts
from headway.runtime.layers import Build, GatedMLP, Linear, Step
from headway.runtime.rounding import RoundedWeight

MIN_WEIGHT_SUM = 1e-20
"""Added to the divisor of weights: all sigmoids may be 0."""


class ExpertLinear(nn.Module):
    """One linear layer for each of E experts; weights (E, outputs, inputs)."""

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
        self.count = count
        self.bias = build.weight(count, outputs) if bias else None
        self.parts = tuple(parts) or (outputs,)
        self.weight: nn.Parameter | None = build.weight(count, outputs, inputs)
        self.kernel = build.kernels.linear
        self.prepared: list[Any] = []
        self.stacked: Any = None
        """The matrices of all experts as one, where the kernel multiplies all at once."""
        self.packed = False

    def prepare(self) -> None:
        """Pack the weight of every expert; plain weights that are not read any more are freed."""
        assert self.weight is not None
        matrices = list(self.weight)
        self.prepared = [self.kernel.prepare(matrix) for matrix in matrices]
        self.packed = self.prepared[0] is not matrices[0]
        if self.can_group and not self.packed:
            self.prepared, self.stacked = [], self.weight
        if self.packed and not self.kernel.few_rows:
            self.weight = None
            self._stack()

    @property
    def can_group(self) -> bool:
        """Whether the kernel multiplies all experts at once."""
        return isinstance(self.kernel, GroupedLinear) and self.kernel.groups

    def _stack(self) -> None:
        """Stack the packed matrices, where the kernel multiplies all experts at once."""
        if self.can_group:
            assert isinstance(self.kernel, GroupedLinear)
            self.stacked, self.prepared = self.kernel.stack(self.prepared), []

    def prepare_rounded(self, experts: Sequence[Sequence[RoundedWeight | None]]) -> None:
        """Pack the parts of each expert that the checkpoint holds rounded.

        None stands for the plain rows of its `weight`.
        """
        assert self.weight is not None and len(experts) == len(self.weight)
        self.prepared = []
        for parts, weight in zip(experts, self.weight, strict=True):
            rows = zip(parts, weight.split(self.parts), strict=True)
            given = [plain if part is None else part for part, plain in rows]
            self.prepared.append(pack_parts(self.kernel, given, self.parts))
        self.packed, self.weight = True, None
        self._stack()

    def restore(self, prepared: list[Any]) -> None:
        """Set weights that were packed before, in place of `prepare`."""
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
        """Bytes of the prepared weights in addition to the plain ones."""
        if not self.packed:
            return 0
        if self.stacked is not None:
            return num_bytes(self.stacked)
        return sum(num_bytes(weight) for weight in self.prepared)

    def grouped(self, x_VH: Tensor, visits: Visits) -> Tensor:
        """Return each row times the matrix of its expert; rows are sorted by expert."""
        assert isinstance(self.kernel, GroupedLinear) and self.stacked is not None
        return self.kernel.grouped(x_VH, self.stacked, self.bias, visits)

    def forward(self, x_TH: Tensor, expert: int) -> Tensor:
        if self.stacked is not None:
            ids_T1 = torch.full((len(x_TH), 1), expert, device=x_TH.device)
            return self.grouped(x_TH, visits_of(ids_T1, self.count))
        bias_O = None if self.bias is None else self.bias[expert]
        if x_TH.shape[0] <= self.kernel.few_rows:
            assert self.weight is not None
            return reference.linear(x_TH, self.weight[expert], bias_O)
        return self.kernel(x_TH, self.prepared[expert], bias_O)


class ExactRouter(nn.Module):
    """A router that multiplies in fp32, whatever the model's type."""

    def __init__(self, build: Build, inputs: int, outputs: int) -> None:
        super().__init__()
        self.parts, self.weight = (outputs,), fp32_weight(build, outputs, inputs)

    def forward(self, x_TH: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_TH.float(), self.weight)


class SharedGate(nn.Module):
    """The weight of the shared experts of a token: a sigmoid of one number, in fp32."""

    def __init__(self, build: Build, inputs: int) -> None:
        super().__init__()
        self.weight = fp32_weight(build, 1, inputs)

    def forward(self, x_TH: Tensor) -> Tensor:
        logits_T1 = (x_TH.float() * self.weight).sum(-1, keepdim=True)
        return reference.evenly(torch.sigmoid, logits_T1).to(x_TH.dtype)


class Fp32Weight(nn.Module):
    """Learned numbers in fp32, whatever the model's type."""

    def __init__(self, build: Build, *shape: int) -> None:
        super().__init__()
        self.weight = fp32_weight(build, *shape)


def fp32_weight(build: Build, *shape: int) -> nn.Parameter:
    """Return an uninitialized weight in fp32."""
    empty = torch.empty(shape, dtype=torch.float32, device=build.device)
    return nn.Parameter(empty, requires_grad=False)


class SparseMLP(nn.Module):
    """A router and its experts, each a gated MLP; and shared experts that every token visits."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec, experts = build.spec, build.spec.experts
        assert experts is not None
        self.experts = experts
        self.active, self.count, self.group = experts.active, experts.count, build.group
        self.own = build.own_experts
        self.router: nn.Module
        if experts.exact_router:
            self.router = ExactRouter(build, spec.hidden_size, experts.count)
        else:
            self.router = Linear(build, spec.hidden_size, experts.count, bias=experts.biased)
        self.correction = Fp32Weight(build, experts.count) if experts.corrected else None
        self.shared = GatedMLP(build, experts.shared_size) if experts.shared else None
        self.shared_gate = SharedGate(build, spec.hidden_size) if experts.shared_gate else None
        inner = experts.intermediate_size
        hidden, count = spec.hidden_size, len(self.own)
        self.gate_up = ExpertLinear(build, count, hidden, 2 * inner, (inner, inner), experts.biased)
        self.down = ExpertLinear(build, count, inner, hidden, bias=experts.biased)
        self.gated = build.kernels.gated[spec.activation]
        if spec.swiglu_limit:
            limit, alpha = spec.swiglu_limit, spec.swiglu_alpha
            self.gated = partial(reference.clamped_silu_mul, limit=limit, alpha=alpha)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        weights_TK, experts_TK = self.route(x_TH)
        if self.gate_up.can_group and self.down.can_group and self.group.size == 1:
            out_VH = self.forward_grouped(x_TH, experts_TK, step)
        else:
            out_VH = self.forward_by_expert(x_TH, experts_TK, step)
        out_TH = (out_VH.unflatten(0, (-1, self.active)) * weights_TK[..., None]).sum(1)
        if self.shared is None:
            return out_TH
        shared_TH = self.shared(x_TH)
        if self.shared_gate is not None:
            shared_TH = shared_TH * self.shared_gate(x_TH)
        return out_TH + shared_TH

    def forward_grouped(self, x_TH: Tensor, experts_TK: Tensor, step: Step) -> Tensor:
        """Return the output of each visit, (V, H), in one product of all experts."""
        visits = visits_of(experts_TK, self.count)
        rows_VH = x_TH.index_select(0, visits.order_V // self.active)
        inner_VI = self.gated(self.gate_up.grouped(rows_VH, visits))
        out_VH = self.down.grouped(inner_VI, visits)
        step.experts_read = step.experts_read + visits.num_read
        return torch.empty_like(out_VH).index_copy_(0, visits.order_V, out_VH)

    def forward_by_expert(self, x_TH: Tensor, experts_TK: Tensor, step: Step) -> Tensor:
        """Return the output of each visit, (V, H), with one product for each visited expert."""
        visits_V = experts_TK.flatten().argsort(stable=True)
        rows_VH = x_TH[visits_V // self.active]
        out_VH = torch.zeros_like(rows_VH)
        counts = experts_TK.flatten().bincount(minlength=self.count).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            end = begin + count
            if count and expert in self.own:
                own = expert - self.own.start
                inner = self.gated(self.gate_up(rows_VH[begin:end], own))
                out_VH[visits_V[begin:end]] = self.down(inner, own)
                step.experts_read += 1
            begin = end
        if self.group.size > 1:
            out_VH = self.group.sum([out_VH])  # all ranks but one have zeros in a row
        return out_VH

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, experts) of the visits of each token, likeliest first, both (T, K)."""
        logits_TE = self.router(x_TH).float()
        sigmoid = self.experts.scoring == "sigmoid"
        scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        ranked_TE = scores_TE
        if self.correction is not None:
            ranked_TE = scores_TE + self.correction.weight
        if self.experts.groups > 1:
            ranked_TE = self.within_groups(ranked_TE)
        experts_TK = ranked_TE.topk(self.active, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if self.experts.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + MIN_WEIGHT_SUM)
        return (weights_TK * self.experts.scale).to(x_TH.dtype), experts_TK

    def within_groups(self, ranked_TE: Tensor) -> Tensor:
        """Set the scores of experts outside of the best groups to -inf.

        The score of a group is that of its best expert; with corrected scores the sum of its two
        best.
        """
        groups_TGE = ranked_TE.unflatten(-1, (self.experts.groups, -1))
        best = 2 if self.experts.corrected else 1
        totals_TG = groups_TGE.topk(best, dim=-1).values.sum(-1)
        chosen = totals_TG.topk(self.experts.active_groups, dim=-1).indices
        left_out = torch.ones_like(totals_TG, dtype=torch.bool).scatter_(-1, chosen, False)
        return groups_TGE.masked_fill(left_out[..., None], float("-inf")).flatten(1)
