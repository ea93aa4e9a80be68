"""Qwen3-Next (Qwen 2025): gated delta nets in three of four layers, gated attention in the fourth.

A sparse layer has a shared expert behind a gate. Layers of multi-token prediction (`mtp.`) are not
read.
"""

from collections.abc import Callable, Sequence

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


QWEN3_NEXT = Architecture(HybridLayer, WEIGHTS, pieces)
