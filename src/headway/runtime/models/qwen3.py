"""Qwen3 (Yang et al. 2025): Llama with a norm on each head's query and key, before the rope.

Qwen3-MoE has experts in place of the MLP, in all layers or in some; Qwen2-MoE is Qwen2 with such
experts, and one that all tokens visit behind a gate.
"""

from torch import Tensor, nn

from headway.runtime.experts import SparseMLP
from headway.runtime.layers import Attention, Build, ResidualLayer, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Weights
from headway.runtime.models.llama import LAYER, WEIGHTS, LlamaLayer

QK_NORM: Weights = {
    LAYER + "self_attn.q_norm": ("layers.{i}.attention.q_norm", None),
    LAYER + "self_attn.k_norm": ("layers.{i}.attention.k_norm", None),
}
EXPERTS: Weights = {
    LAYER + "mlp.gate": ("layers.{i}.mlp.router", None),
    LAYER + "mlp.experts.{e}.gate_proj": ("layers.{i}.mlp.gate_up", "gate"),
    LAYER + "mlp.experts.{e}.up_proj": ("layers.{i}.mlp.gate_up", "up"),
    LAYER + "mlp.experts.{e}.down_proj": ("layers.{i}.mlp.down", None),
}
SHARED = LAYER + "mlp.shared_expert."
SHARED_EXPERT: Weights = {
    SHARED + "gate_proj": ("layers.{i}.mlp.shared.gate_up", "gate"),
    SHARED + "up_proj": ("layers.{i}.mlp.shared.gate_up", "up"),
    SHARED + "down_proj": ("layers.{i}.mlp.shared.down", None),
    LAYER + "mlp.shared_expert_gate": ("layers.{i}.mlp.shared_gate", None),
}


class SparseLayer(ResidualLayer):
    """A Llama layer with a sparse MLP."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = Attention(build, index)
        self.mlp_norm = RMSNorm(build)
        self.mlp = SparseMLP(build)

    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        x_TH, normed_TH = self.attention_norm.add_and_norm(x_TH, more_TH)
        x_TH, normed_TH = self.mlp_norm.add_and_norm(x_TH, self.attention(normed_TH, step))
        return x_TH, self.mlp(normed_TH, step)


def moe_layer(build: Build, index: int) -> nn.Module:
    """Return a sparse or a dense layer, as the spec has it at `index`."""
    layer = SparseLayer if build.spec.layers[index].sparse else LlamaLayer
    return layer(build, index)


QWEN3 = Architecture(LlamaLayer, WEIGHTS | QK_NORM)
QWEN2_MOE = Architecture(moe_layer, WEIGHTS | EXPERTS | SHARED_EXPERT)
QWEN3_MOE = Architecture(moe_layer, WEIGHTS | QK_NORM | EXPERTS)
