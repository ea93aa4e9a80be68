"""The layers of all model files. State is passed in a `Step`: batch, KV and angles.

T tokens, H hidden size, N query heads, G KV heads, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headway.config.parallel import Cut, Parallel, bounds
from headway.runtime.attention import AttentionBackend, AttentionRule, KVLayer, TritonAttention
from headway.runtime.batch import Batch
from headway.runtime.kernels import Kernels, reference
from headway.runtime.kernels.parts import Parts, num_bytes, pack_parts
from headway.runtime.native.lower import recordable
from headway.runtime.parallel.group import RankGroup, SingleRank
from headway.runtime.parallel.stage import Stage
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Arguments of every layer: dimensions, kernels, type and device of weights.

    `spec` describes the part of the model on this rank of `group`.
    """

    spec: ModelSpec
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: str
    parallel: Parallel = Parallel()
    cut: Cut | None = None
    group: RankGroup = field(default_factory=SingleRank)
    stage: Stage = Stage()

    @property
    def own_experts(self) -> range:
        """The experts of each layer that are on this rank."""
        ends = bounds(self.spec.experts.count if self.spec.experts else 0, self.group.size)
        return range(ends[self.group.rank], ends[self.group.rank + 1])

    def weight(self, *shape: int) -> nn.Parameter:
        """Return an uninitialized weight; loading fills it, or raises."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)


@dataclass(slots=True, kw_only=True)
class Step:
    """The state of one forward: its batch, the KV of all layers, the angles of its tokens.

    `angles` holds (cos, sin) for each rope of the spec; `experts_read` counts the experts that were
    read in all layers, on a GPU as a tensor of the device.
    """

    batch: Batch
    kv: list[KVLayer]
    angles: list[tuple[Tensor, Tensor]]
    experts_read: int | Tensor = 0


class Linear(nn.Module):
    """x · weightᵀ + bias. `prepare` or `prepare_rounded` is called once, after loading.

    `parts` are the outputs of each matrix of the checkpoint, where the layer holds several.
    """

    def __init__(
        self,
        build: Build,
        inputs: int,
        outputs: int,
        bias: bool = False,
        parts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.parts = tuple(parts) or (outputs,)
        self.weight: Tensor | None = build.weight(outputs, inputs)
        self.bias = build.weight(outputs) if bias else None
        self.kernel = build.kernels.linear
        self.prepared: Any = None

    def prepare(self) -> None:
        """Pack the weight for the kernel; a plain weight that is not read any more is freed."""
        assert self.weight is not None
        self.prepared = self.kernel.prepare(self.weight)
        if self.prepared is not self.weight and not self.kernel.few_rows:
            self.weight = None

    def prepare_rounded(self, parts: Sequence[RoundedWeight | None]) -> None:
        """Pack parts that the checkpoint holds rounded; None stands for the plain rows of `weight`.

        Neighbors of one format are joined (`Quantization.formats_of`): with q and k in int4 and v
        in int8, q and k are one matrix.
        """
        assert self.weight is not None and len(parts) == len(self.parts)
        rows = zip(parts, self.weight.split(self.parts), strict=True)
        given = [plain if part is None else part for part, plain in rows]
        self.prepared = pack_parts(self.kernel, given, self.parts)
        self.weight = None

    def restore(self, prepared: list[Any]) -> None:
        """Set a weight that was packed before, in place of `prepare`."""
        (self.prepared,) = prepared
        self.weight = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the matrix, before it is prepared."""
        assert self.weight is not None
        outputs, inputs = self.weight.shape
        return [(outputs, inputs)]

    @property
    def matrices(self) -> list[Any]:
        """The prepared matrix, or those of its parts."""
        return self.prepared.matrices if isinstance(self.prepared, Parts) else [self.prepared]

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the prepared weight in addition to the plain one."""
        assert self.prepared is not None
        return 0 if self.prepared is self.weight else num_bytes(self.prepared)

    def forward(self, x_TH: Tensor) -> Tensor:
        few = x_TH.shape[0] <= self.kernel.few_rows
        if self.weight is not None and few and x_TH.dtype == self.weight.dtype:
            return reference.linear(x_TH, self.weight, self.bias)
        assert self.prepared is not None
        return self.kernel(x_TH, self.prepared, self.bias)


class RowLinear(Linear):
    """A linear layer split by inputs: the sum of the products of its parts, over all ranks.

    Each part is a matrix of its own, so its bits do not depend on the rank that computes it. The
    bias belongs to the first part.
    """

    def __init__(
        self, build: Build, inputs: int, outputs: int, bias: bool, parts: Sequence[int]
    ) -> None:
        super().__init__(build, inputs, outputs, bias)
        assert parts[-1] - parts[0] == inputs
        self.group = build.group
        self.bounds = [at - parts[0] for at in parts]
        self.prepared: list[Any] = []

    def prepare(self) -> None:
        assert self.weight is not None
        sizes = [end - begin for begin, end in pairwise(self.bounds)]
        cut = [part.contiguous() for part in self.weight.split(sizes, dim=1)]
        self.prepared = [self.kernel.prepare(part) for part in cut]
        self.weight = None

    def restore(self, prepared: list[Any]) -> None:
        self.prepared, self.weight = prepared, None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each part, before they are prepared."""
        ((outputs, _),) = super().shapes
        return [(outputs, end - begin) for begin, end in pairwise(self.bounds)]

    def prepare_rounded(self, parts: Sequence[RoundedWeight | None]) -> None:
        (whole,) = parts
        assert whole is not None and self.weight is not None
        cut = [whole.columns(slice(*ends)) for ends in pairwise(self.bounds)]
        self.prepared = [pack_parts(self.kernel, [part], self.parts) for part in cut]
        self.weight = None

    @property
    def matrices(self) -> list[Any]:
        """The prepared matrices, a part each."""
        return self.prepared

    @property
    def prepared_bytes(self) -> int:
        return sum(map(num_bytes, self.prepared))

    def forward(self, x_TH: Tensor) -> Tensor:
        products = []
        for (begin, end), matrix in zip(pairwise(self.bounds), self.prepared, strict=True):
            bias = self.bias if self.group.rank == 0 and begin == 0 else None
            part_TH = x_TH if len(self.prepared) == 1 else x_TH[:, begin:end].contiguous()
            products.append(self.kernel(part_TH, matrix, bias))
        if len(products) > 1:
            return self.group.sum(products)
        return self._sum(products[0], lambda own_TH: self.group.sum([own_TH]))

    @recordable("over_ranks")
    def _sum(self, own_TH: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        return work(own_TH)


def row_linear(
    build: Build, inputs: int, outputs: int, bias: bool, parts: Sequence[int] = ()
) -> Linear:
    """Return a linear layer behind heads or neurons, split over ranks where these are.

    `parts` are the bounds of its inputs, by default of equal sizes.
    """
    if not build.parallel.is_cut:
        return Linear(build, inputs, outputs, bias)
    unit = build.kernels.quantization.unit
    parts = parts or bounds(inputs, build.parallel.num_parts, unit)
    return RowLinear(build, inputs, outputs, bias, parts)


class RMSNorm(nn.Module):
    """Root-mean-square norm of `size` channels (hidden size by default) with a learned scale."""

    def __init__(self, build: Build, size: int | None = None, eps: float | None = None) -> None:
        super().__init__()
        self.weight = build.weight(size or build.spec.hidden_size)
        self.eps = build.spec.rms_norm_eps if eps is None else eps
        self.offset = build.spec.norm_offset
        self.kernel = build.kernels.rms_norm
        self.add_kernel = build.kernels.add_rms_norm

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.kernel(x_TH, self.weight, self.eps, self.offset)

    def add_and_norm(self, x_TH: Tensor, more_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (x + more, its norm), in one pass where there is a kernel for both."""
        if more_TH is None:
            return x_TH, self(x_TH)
        if self.add_kernel is not None:
            return self.add_kernel(x_TH, more_TH, self.weight, self.eps, self.offset)
        x_TH = x_TH + more_TH
        return x_TH, self(x_TH)


class ResidualLayer(nn.Module, ABC):
    """A layer that leaves its last residual sum to the next layer, where norm and sum are one pass.

    x, more = forward_residual(x, more)      the output of the layer is x + more
    """

    @abstractmethod
    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Return (residual, pending summand), given those of the layer before."""

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        x_TH, more_TH = self.forward_residual(x_TH, None, step)
        return x_TH + more_TH


class UnitNorm(nn.Module):
    """Root-mean-square norm of `size` channels without a learned scale."""

    def __init__(self, build: Build, size: int) -> None:
        super().__init__()
        self.ones = torch.ones(size, dtype=build.dtype, device=build.device)
        self.eps = build.spec.rms_norm_eps
        self.kernel = build.kernels.rms_norm

    def forward(self, x_TGD: Tensor) -> Tensor:
        return self.kernel(x_TGD, self.ones, self.eps, 0.0)


class SinkLogits(nn.Module):
    """A learned logit for each query head."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(build.spec.num_heads)


class Attention(nn.Module):
    """Self-attention over paged KV. The spec and its layer select the variant:

    MHA (G = N), GQA or MQA (G = 1); a window; a soft cap; a sink logit by head; norms on queries
    and keys, by head or on the whole row, and on values; one rope or another, or none; keys and
    values of its own, or those of an earlier layer; a gate on the output.
    """

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        spec, layer = build.spec, build.spec.layers[index]
        self.reads_other_kv = layer.kv_from is not None
        self.index = index if layer.kv_from is None else layer.kv_from
        self.sizes = [spec.q_rows, *([] if self.reads_other_kv else [spec.kv_size, spec.kv_size])]
        self.head_dim = spec.head_dim
        hidden, q = spec.hidden_size, spec.q_size
        self.qkv = Linear(build, hidden, sum(self.sizes), bias=spec.qkv_bias, parts=self.sizes)
        parts = build.cut.q if build.cut is not None else ()
        self.out = row_linear(build, q, hidden, spec.o_bias, parts)
        self.has_gate = spec.output_gate
        self.norm_rows, self.norm_heads = spec.qk_norm == "row", spec.qk_norm == "head"
        if self.norm_rows or self.norm_heads:
            self.q_norm = RMSNorm(build, spec.head_dim if self.norm_heads else spec.q_size)
            if not self.reads_other_kv:
                self.k_norm = RMSNorm(build, spec.head_dim if self.norm_heads else spec.kv_size)
        self.v_norm = (
            UnitNorm(build, spec.head_dim) if spec.v_norm and not self.reads_other_kv else None
        )
        self.rope_index = layer.rope
        self.query_rope = layer.rope if layer.query_rope is None else layer.query_rope
        self.rope = build.kernels.rope
        self.backend = build.attention
        self.rope_write = None
        alike = self.rope_index is not None and self.query_rope == self.rope_index
        if isinstance(self.backend, TritonAttention) and alike:
            self.rope_write = self.backend.rope_write
        self.sink_logits = SinkLogits(build) if spec.sink_logits else None
        self.rule = AttentionRule(
            scale=spec.attention_scale,
            window=layer.window,
            softcap=spec.attention_softcap,
            sinks=layer.sinks,
            sink_logits=None if self.sink_logits is None else self.sink_logits.weight,
        )

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        if self.reads_other_kv:
            return self.forward_without_kv(x_TH, step)
        q, k, v = self.qkv(x_TH).split(self.sizes, dim=-1)
        if self.norm_rows:
            q, k = self.q_norm(q), self.k_norm(k)
        q_TND, k_TGD, v_TGD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.has_gate:  # the queries and the gate of a head are adjacent
            q_TND, gate_TND = q_TND.unflatten(1, (-1, 2)).unbind(2)
        if self.norm_heads:
            q_TND, k_TGD = self.q_norm(q_TND), self.k_norm(k_TGD)
        if self.v_norm is not None:
            v_TGD = self.v_norm(v_TGD)
        layer, written = step.kv[self.index], None
        if self.rope_write is not None and self.rope_index is not None:
            angles = step.angles[self.rope_index]
            written = self.rope_write(q_TND, k_TGD, v_TGD, angles, layer, step.batch)
        if written is not None:
            attended = self.backend.attend(written, None, None, layer, step.batch, self.rule)
            return self.out(attended.flatten(1))
        if self.rope_index is not None and self.query_rope is not None:
            q_TND = self.rope(q_TND, *step.angles[self.query_rope])
            k_TGD = self.rope(k_TGD, *step.angles[self.rope_index])
        attended = self.backend.attend(q_TND, k_TGD, v_TGD, layer, step.batch, self.rule)
        if self.has_gate:
            attended = attended * reference.evenly(torch.sigmoid, gate_TND)
        return self.out(attended.flatten(1))

    def forward_without_kv(self, x_TH: Tensor, step: Step) -> Tensor:
        """Run `forward` with queries alone, on the keys and values of an earlier layer."""
        assert not self.norm_rows and self.query_rope is not None
        q_TND = self.qkv(x_TH).unflatten(-1, (-1, self.head_dim))
        q_TND = self.q_norm(q_TND) if self.norm_heads else q_TND
        q_TND = self.rope(q_TND, *step.angles[self.query_rope])
        layer = step.kv[self.index]
        attended = self.backend.attend(q_TND, None, None, layer, step.batch, self.rule)
        return self.out(attended.flatten(1))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)); gate and up are one matrix, `inner` is their width."""

    def __init__(self, build: Build, inner: int | None = None) -> None:
        super().__init__()
        spec = build.spec
        hidden, bias = spec.hidden_size, spec.mlp_bias
        parts = build.cut.neurons if inner is None and build.cut is not None else ()
        inner = spec.intermediate_size if inner is None else inner
        self.gate_up = Linear(build, hidden, 2 * inner, bias=bias, parts=(inner, inner))
        self.down = row_linear(build, inner, hidden, bias, parts)
        self.gated = build.kernels.gated[spec.activation]

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x_TH)))
