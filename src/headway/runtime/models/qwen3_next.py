"""Qwen3-Next (Qwen 2025): gated delta nets in three of four layers, gated attention in the fourth.

A sparse layer has a shared expert behind a gate. Qwen3.5 is alike, with other matrices in front of
the delta nets; it is dense, or its checkpoints hold the experts of a layer stacked, (E, 2 · I, H)
and (E, H, I). Layers of multi-token prediction (`mtp.`) are not read.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from headway.runtime.experts import SparseMLP
from headway.runtime.layers import Attention, Build, GatedMLP, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Pieces, Weights, whole
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import EXPERTS, QK_NORM, SHARED_EXPERT
from headway.runtime.states import MIXERS

THEIRS, OURS = LAYER + "linear_attn.", "layers.{i}.state."
WEIGHTS: Weights = {
    **LLAMA_WEIGHTS,
    **QK_NORM,
    **EXPERTS,
    **SHARED_EXPERT,
    THEIRS + "in_proj_qkvz": (OURS + "project", None),
    THEIRS + "in_proj_ba": (OURS + "project_gates", None),
    THEIRS + "conv1d": (OURS + "convolution", None),
    THEIRS + "A_log": (OURS + "decay_log", None),
    THEIRS + "dt_bias": (OURS + "step_bias", None),
    THEIRS + "norm": (OURS + "scale", None),
    THEIRS + "out_proj": (OURS + "out", None),
}
QWEN35_WEIGHTS: Weights = {
    **{name: place for name, place in WEIGHTS.items() if ".in_proj_" not in name},
    THEIRS + "in_proj_qkv": (OURS + "project", None),
    THEIRS + "in_proj_z": (OURS + "project_gate", None),
    THEIRS + "in_proj_b": (OURS + "project_gain", None),
    THEIRS + "in_proj_a": (OURS + "project_step", None),
}
BARE = (".A_log", ".dt_bias", ".D", ".expert_bias")
"""Suffixes of weights without a module in the checkpoint."""


class HybridLayer(nn.Module):
    """A layer with attention or a recurrent state, as the spec says, and an MLP."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        layer, states = build.spec.layers[index], build.spec.states
        self.keeps_state, self.sparse = layer.state, layer.sparse
        self.residual_scale = build.spec.residual_scale
        self.attention_norm = RMSNorm(build)
        if layer.state and states is not None:
            self.state = MIXERS[states.rule](build, index)
        else:
            self.attention = Attention(build, index)
        self.mlp_norm = RMSNorm(build)
        self.mlp = SparseMLP(build) if layer.sparse else self.dense(build)

    def dense(self, build: Build) -> nn.Module:
        """Return the MLP of a layer without experts."""
        return GatedMLP(build)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        normed_TH = self.attention_norm(x_TH)
        mixed_TH = (self.state if self.keeps_state else self.attention)(normed_TH, step)
        x_TH = x_TH + self.scaled(mixed_TH)
        normed_TH = self.mlp_norm(x_TH)
        return x_TH + self.scaled(self.mlp(normed_TH, step) if self.sparse else self.mlp(normed_TH))

    def scaled(self, x_TH: Tensor) -> Tensor:
        """Return `x_TH` times the residual multiplier."""
        return x_TH if self.residual_scale == 1.0 else x_TH * self.residual_scale


def pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Return the tensor under its name; bare weights get `.weight`, (C, 1, W) becomes (C, W)."""
    if name.endswith(".conv1d.weight"):
        return [(name, lambda weight: weight.flatten(1))]
    if name.endswith(BARE):
        return [(f"{name}.weight", lambda numbers: numbers)]
    return whole(name, shape)


def qwen35_pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Split stacked experts into matrices of each, the rest as `pieces`."""
    base, stacked, last = name.partition(".mlp.experts.")
    if not stacked or last not in ("gate_up_proj", "down_proj"):
        return pieces(name, shape)
    return parts_of_experts(f"{base}.mlp.experts", shape(), last == "gate_up_proj")


def parts_of_experts(name: str, shape: Sequence[int], is_gate_up: bool) -> Pieces:
    """Return the matrices of each expert of a stack, gates before ups."""
    count, outputs, _ = shape
    half = outputs // 2
    parts = {"gate_proj": (0, half), "up_proj": (half, half)}
    return [
        (f"{name}.{expert}.{part}.weight", partial(expert_rows, expert=expert, rows=rows))
        for expert in range(count)
        for part, rows in (parts if is_gate_up else {"down_proj": (0, outputs)}).items()
    ]


def expert_rows(stacked: Tensor, expert: int, rows: tuple[int, int]) -> Tensor:
    """Return some outputs, (first, count), of an expert."""
    return stacked[expert].narrow(0, *rows)


QWEN35 = Architecture(HybridLayer, QWEN35_WEIGHTS, qwen35_pieces)
QWEN3_NEXT = Architecture(HybridLayer, WEIGHTS, pieces)
