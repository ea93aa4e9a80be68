"""The layers that model files are drawn with. State is passed: a step's batch, cache and angles.

T tokens, H hidden size, N query heads, G KV heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.core.model_spec import ModelSpec
from headway.runtime.attention import AttentionBackend, AttentionRule, KVLayer
from headway.runtime.batch import Batch
from headway.runtime.kernels import Kernels, reference
from headway.runtime.kernels.parts import Parts, num_bytes, pack_parts
from headway.runtime.rounding import RoundedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What every layer is made with: the dimensions, the kernels, type and device of weights."""

    spec: ModelSpec
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: str

    def weight(self, *shape: int) -> nn.Parameter:
        """An uninitialized weight; the checkpoint fills it, and asserts that it did."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)


@dataclass(slots=True, kw_only=True)
class Step:
    """What one forward passes down: its batch, the KV of all layers, the angles of its tokens.

    `angles` holds (cos, sin) for each rope of the spec; `experts_read` counts the experts that
    were hit, over all layers, on the way.
    """

    batch: Batch
    kv: list[KVLayer]
    angles: list[tuple[Tensor, Tensor]]
    experts_read: int = 0


class Linear(nn.Module):
    """x · weightᵀ + bias. `prepare` or `take` is called once, when the weights are loaded.

    `parts` are the outputs of each matrix of a checkpoint that it holds, where it holds several.
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
        """Bring the weight into the kernel's form; one that is not read any more is let go."""
        assert self.weight is not None
        self.prepared = self.kernel.prepare(self.weight)
        if self.prepared is not self.weight and not self.kernel.few_rows:
            self.weight = None

    def take(self, parts: Sequence[RoundedWeight | None]) -> None:
        """The same with parts that a checkpoint holds rounded; None: the rows in `weight`, plain.

        q and k in int4 and v in int8: q and k are joined, as `Quantization.formats_of` says.
        """
        assert self.weight is not None and len(parts) == len(self.parts)
        rows = zip(parts, self.weight.split(self.parts), strict=True)
        given = [plain if part is None else part for part, plain in rows]
        self.prepared = pack_parts(self.kernel, given, self.parts)
        self.weight = None

    def restore(self, prepared: list[Any]) -> None:
        """Take a weight that was prepared before, in place of `prepare`."""
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
        """Bytes of the prepared weight beside the plain one."""
        assert self.prepared is not None
        return 0 if self.prepared is self.weight else num_bytes(self.prepared)

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.weight is not None and x_TH.shape[0] <= self.kernel.few_rows:
            return reference.linear(x_TH, self.weight, self.bias)
        assert self.prepared is not None
        return self.kernel(x_TH, self.prepared, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square normalization of `size` channels (hidden by default), a learned scale."""

    def __init__(self, build: Build, size: int | None = None) -> None:
        super().__init__()
        self.weight = build.weight(size or build.spec.hidden_size)
        self.eps = build.spec.rms_norm_eps
        self.offset = build.spec.norm_offset
        self.kernel = build.kernels.rms_norm

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.kernel(x_TH, self.weight, self.eps, self.offset)


class SinkLogits(nn.Module):
    """A learned logit for each query head."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(build.spec.num_heads)


class Attention(nn.Module):
    """Self-attention over paged KV. Its variants are numbers of the spec and of its layer:

    MHA (G = N), GQA or MQA (G = 1); a window; a soft cap; a sink logit by head; norms on queries
    and keys, by head or on the whole row; one rope or another, or none.
    """

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        spec, layer = build.spec, build.spec.layers[index]
        self.index = index
        self.sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        self.head_dim = spec.head_dim
        hidden, q = spec.hidden_size, spec.q_size
        self.qkv = Linear(build, hidden, sum(self.sizes), bias=spec.qkv_bias, parts=self.sizes)
        self.out = Linear(build, q, hidden, bias=spec.o_bias)
        self.norm_rows, self.norm_heads = spec.qk_norm == "row", spec.qk_norm == "head"
        if self.norm_rows or self.norm_heads:
            self.q_norm = RMSNorm(build, spec.head_dim if self.norm_heads else spec.q_size)
            self.k_norm = RMSNorm(build, spec.head_dim if self.norm_heads else spec.kv_size)
        self.rope_index = layer.rope
        self.rope = build.kernels.rope
        self.backend = build.attention
        self.sink_logits = SinkLogits(build) if spec.sink_logits else None
        self.rule = AttentionRule(
            scale=spec.attention_scale,
            window=layer.window,
            softcap=spec.attention_softcap,
            sinks=layer.sinks,
            sink_logits=None if self.sink_logits is None else self.sink_logits.weight,
        )

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        q, k, v = self.qkv(x_TH).split(self.sizes, dim=-1)
        if self.norm_rows:
            q, k = self.q_norm(q), self.k_norm(k)
        q_TND, k_TGD, v_TGD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.norm_heads:
            q_TND, k_TGD = self.q_norm(q_TND), self.k_norm(k_TGD)
        if self.rope_index is not None:
            cos, sin = step.angles[self.rope_index]
            q_TND, k_TGD = self.rope(q_TND, cos, sin), self.rope(k_TGD, cos, sin)
        layer = step.kv[self.index]
        attended = self.backend.attend(q_TND, k_TGD, v_TGD, layer, step.batch, self.rule)
        return self.out(attended.flatten(1))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up as one matrix."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.gate_up = Linear(build, hidden, 2 * inner, bias=bias, parts=(inner, inner))
        self.down = Linear(build, inner, hidden, bias=bias)
        self.gated = build.kernels.gated[spec.activation]

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x_TH)))
