"""Granite 3 (IBM 2024): Llama with fixed multipliers on embeddings, scores, residuals and logits.

This file applies the residual one; the others are numbers of the spec.
"""

from torch import Tensor

from headway.runtime.layers import Build, Step
from headway.runtime.models.decoder import Architecture
from headway.runtime.models.llama import WEIGHTS, LlamaLayer


class GraniteLayer(LlamaLayer):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        self.residual_scale = build.spec.residual_scale

    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        x_TH, normed_TH = self.attention_norm.add_and_norm(x_TH, more_TH)
        attended_TH = self.attention(normed_TH, step) * self.residual_scale
        x_TH, normed_TH = self.mlp_norm.add_and_norm(x_TH, attended_TH)
        return x_TH, self.mlp(normed_TH) * self.residual_scale


GRANITE = Architecture(GraniteLayer, WEIGHTS)
