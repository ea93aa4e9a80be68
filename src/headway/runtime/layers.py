"""The layers that model files are drawn with. State is passed: a step's batch, cache and angles.

T tokens, H hidden size, N query heads, G KV heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.core.model_spec import ModelSpec
from headway.runtime.attention import AttentionBackend, KVLayer
from headway.runtime.batch import Batch
from headway.runtime.kernels import Kernels, reference


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
    """What one forward passes down: its batch, the KV of all layers, the angles of its tokens."""

    batch: Batch
    kv: list[KVLayer]
    cos: Tensor
    sin: Tensor


class Linear(nn.Module):
    """x · weightᵀ + bias. `prepare` is called once, when the weights are loaded."""

    def __init__(self, build: Build, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = build.weight(outputs, inputs)
        self.bias = build.weight(outputs) if bias else None
        self.kernel = build.kernels.linear
        self.prepared: Tensor | None = None

    def prepare(self) -> None:
        """Bring the weight into the kernel's form; one that is not read any more is let go."""
        assert self.weight is not None
        self.prepared = self.kernel.prepare(self.weight)
        if self.prepared is not self.weight and not self.kernel.few_rows:
            self.weight = None

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the prepared weight; a packed tensor cannot say them itself."""
        assert self.prepared is not None
        return int(self.prepared.numel() * self.prepared.element_size())

    def forward(self, x_TH: Tensor) -> Tensor:
        if x_TH.shape[0] <= self.kernel.few_rows:
            return reference.linear(x_TH, self.weight, self.bias)
        assert self.prepared is not None
        return self.kernel(x_TH, self.prepared, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a learned scale."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(build.spec.hidden_size)
        self.eps = build.spec.rms_norm_eps
        self.kernel = build.kernels.rms_norm

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.kernel(x_TH, self.weight, self.eps)


class Attention(nn.Module):
    """Rotary self-attention over paged KV: MHA (G = N), GQA or MQA (G = 1)."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        spec = build.spec
        self.index = index
        self.sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        self.head_dim = spec.head_dim
        self.qkv = Linear(build, spec.hidden_size, sum(self.sizes), bias=spec.qkv_bias)
        self.out = Linear(build, spec.q_size, spec.hidden_size, bias=spec.o_bias)
        self.backend = build.attention
        self.rope = build.kernels.rope

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        q, k, v = self.qkv(x_TH).split(self.sizes, dim=-1)
        q_TND, k_TGD, v_TGD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q_TND = self.rope(q_TND, step.cos, step.sin)
        k_TGD = self.rope(k_TGD, step.cos, step.sin)
        attended = self.backend.attend(q_TND, k_TGD, v_TGD, step.kv[self.index], step.batch)
        return self.out(attended.flatten(1))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up as one matrix."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.gate_up = Linear(build, hidden, 2 * inner, bias=bias)
        self.down = Linear(build, inner, hidden, bias=bias)
        self.silu_mul = build.kernels.silu_mul

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.silu_mul(self.gate_up(x_TH)))
