"""Granite 3 (IBM 2024): Llama with fixed multipliers on embeddings, scores, residuals and logits.

Only the residual one is drawn here; the others are numbers of the spec.
"""

from torch import Tensor

from headway.runtime.layers import Build, Step
from headway.runtime.models.decoder import Architecture
from headway.runtime.models.llama import WEIGHTS, LlamaLayer


class GraniteLayer(LlamaLayer):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        self.residual_scale = build.spec.residual_scale

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), step) * self.residual_scale
        return x_TH + self.mlp(self.mlp_norm(x_TH)) * self.residual_scale


GRANITE = Architecture(GraniteLayer, WEIGHTS)
