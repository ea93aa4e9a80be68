"""OLMo 2 and 3 (OLMo Team 2025): norms after attention and MLP, not before, and on q and k rows.

     ┌───────────┐                ┌─────┐
x ─┬─┤ attention ├─ norm ─ + ─┬───┤ MLP ├─ norm ─ + ──▶ next layer
   └─┴───────────┴─────────┘  └───┴─────┴─────────┘

Three of four layers of OLMo 3 have a window.
"""

from torch import Tensor, nn

from headway.runtime.layers import Attention, Build, GatedMLP, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import QK_NORM

WEIGHTS: Weights = {
    **{k: v for k, v in LLAMA_WEIGHTS.items() if k != LAYER + "input_layernorm"},
    **QK_NORM,
    LAYER + "post_attention_layernorm": ("layers.{i}.attended_norm", None),
    LAYER + "post_feedforward_layernorm": ("layers.{i}.out_norm", None),
}


class Olmo2Layer(nn.Module):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention = Attention(build, index)
        self.attended_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)
        self.out_norm = RMSNorm(build)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        x_TH = x_TH + self.attended_norm(self.attention(x_TH, step))
        return x_TH + self.out_norm(self.mlp(x_TH))


OLMO2 = Architecture(Olmo2Layer, WEIGHTS)
