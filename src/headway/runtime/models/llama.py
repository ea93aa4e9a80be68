"""Llama 2 and 3.x (Touvron et al. 2023), and models that differ from it in dimensions alone.

             ┌──────────────┐            ┌────────┐
x ──┬─ norm ─┤ attention    ├─ + ─┬─ norm ┤ MLP    ├─ + ──▶ next layer … norm ─▶ head
    └────────┴──────────────┴──┘  └───────┴────────┴──┘

Mistral has a window, Ministral 3 queries that grow with their position, Qwen2 and 2.5 a bias on
queries, keys and values, SmolLM3 layers without a rope.
"""

from torch import Tensor

from headway.runtime.layers import Attention, Build, GatedMLP, ResidualLayer, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Weights

LAYER = "model.layers.{i}."
WEIGHTS: Weights = {
    "model.embed_tokens": ("embedding", None),
    LAYER + "input_layernorm": ("layers.{i}.attention_norm", None),
    LAYER + "self_attn.q_proj": ("layers.{i}.attention.qkv", "q"),
    LAYER + "self_attn.k_proj": ("layers.{i}.attention.qkv", "k"),
    LAYER + "self_attn.v_proj": ("layers.{i}.attention.qkv", "v"),
    LAYER + "self_attn.o_proj": ("layers.{i}.attention.out", None),
    LAYER + "post_attention_layernorm": ("layers.{i}.mlp_norm", None),
    LAYER + "mlp.gate_proj": ("layers.{i}.mlp.gate_up", "gate"),
    LAYER + "mlp.up_proj": ("layers.{i}.mlp.gate_up", "up"),
    LAYER + "mlp.down_proj": ("layers.{i}.mlp.down", None),
    "model.norm": ("norm", None),
    "lm_head": ("head", None),
}


class LlamaLayer(ResidualLayer):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = Attention(build, index)
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)

    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        x_TH, normed_TH = self.attention_norm.add_and_norm(x_TH, more_TH)
        x_TH, normed_TH = self.mlp_norm.add_and_norm(x_TH, self.attention(normed_TH, step))
        return x_TH, self.mlp(normed_TH)


LLAMA = Architecture(LlamaLayer, WEIGHTS)
