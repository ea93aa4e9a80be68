"""Gemma 2 and 3, text (Gemma Team 2024, 2025): norms on both sides of attention and MLP.

                ┌───────────┐                  ┌─────┐
x ──┬─ (1+w)norm┤ attention ├norm ─ + ─┬─ norm ┤ MLP ├ norm ─ + ──▶ next layer
    └───────────┴───────────┴───────┘  └───────┴─────┴────────┘

Layers with a window take turns with full ones, 1 : 1 in Gemma 2 and 5 : 1 in Gemma 3. Embeddings
are scaled by √hidden; Gemma 2 caps scores and logits softly, Gemma 3 norms queries and keys and
has a rope of its own for window layers.
"""

from torch import Tensor

from headway.runtime.layers import Attention, Build, GatedMLP, ResidualLayer, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import QK_NORM

WEIGHTS: Weights = {
    **LLAMA_WEIGHTS,
    LAYER + "post_attention_layernorm": ("layers.{i}.attended_norm", None),
    LAYER + "pre_feedforward_layernorm": ("layers.{i}.mlp_norm", None),
    LAYER + "post_feedforward_layernorm": ("layers.{i}.out_norm", None),
}


class GemmaLayer(ResidualLayer):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = Attention(build, index)
        self.attended_norm = RMSNorm(build)
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)
        self.out_norm = RMSNorm(build)

    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        x_TH, normed_TH = self.attention_norm.add_and_norm(x_TH, more_TH)
        attended_TH = self.attended_norm(self.attention(normed_TH, step))
        x_TH, normed_TH = self.mlp_norm.add_and_norm(x_TH, attended_TH)
        return x_TH, self.out_norm(self.mlp(normed_TH))


GEMMA2 = Architecture(GemmaLayer, WEIGHTS)
GEMMA3 = Architecture(GemmaLayer, WEIGHTS | QK_NORM)
