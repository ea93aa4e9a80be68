"""DeepSeek V2 and V3 (DeepSeek-AI 2024): latent attention, routed and shared experts.

The first layers are dense. Layers of multi-token prediction in checkpoints of V3 are not read.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from headway.runtime.experts import SparseMLP
from headway.runtime.latent import LatentAttention
from headway.runtime.layers import Build, GatedMLP, ResidualLayer, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Pieces, Weights, whole
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import EXPERTS

ATTENTION, OURS = LAYER + "self_attn.", "layers.{i}.attention."
SHARED, CORRECTION = LAYER + "mlp.shared_experts.", "e_score_correction_bias"
WEIGHTS: Weights = {
    **{name: place for name, place in LLAMA_WEIGHTS.items() if ".self_attn." not in name},
    **EXPERTS,
    ATTENTION + "q_proj": (OURS + "q", None),
    ATTENTION + "q_a_proj": (OURS + "q_down", None),
    ATTENTION + "q_a_layernorm": (OURS + "q_norm", None),
    ATTENTION + "q_b_proj": (OURS + "q_up", None),
    ATTENTION + "kv_a_proj_with_mqa": (OURS + "kv_down", None),
    ATTENTION + "kv_a_layernorm": (OURS + "kv_norm", None),
    ATTENTION + "kv_b_proj": (OURS + "kv_up", None),
    ATTENTION + "o_proj": (OURS + "out", None),
    SHARED + "gate_proj": ("layers.{i}.mlp.shared.gate_up", "gate"),
    SHARED + "up_proj": ("layers.{i}.mlp.shared.gate_up", "up"),
    SHARED + "down_proj": ("layers.{i}.mlp.shared.down", None),
    LAYER + "mlp.gate." + CORRECTION: ("layers.{i}.mlp.correction", None),
}


class DeepseekLayer(ResidualLayer):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = LatentAttention(build, index)
        self.mlp_norm = RMSNorm(build)
        self.sparse = build.spec.layers[index].sparse
        self.mlp = SparseMLP(build) if self.sparse else GatedMLP(build)

    def forward_residual(
        self, x_TH: Tensor, more_TH: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        x_TH, normed_TH = self.attention_norm.add_and_norm(x_TH, more_TH)
        x_TH, normed_TH = self.mlp_norm.add_and_norm(x_TH, self.attention(normed_TH, step))
        return x_TH, self.mlp(normed_TH, step) if self.sparse else self.mlp(normed_TH)


def pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Return the tensor under its own name; the correction of a router gets `.weight`."""
    if name.endswith("." + CORRECTION):
        return [(f"{name}.weight", lambda numbers: numbers)]
    return whole(name, shape)


DEEPSEEK = Architecture(DeepseekLayer, WEIGHTS, pieces)
