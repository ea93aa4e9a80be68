"""Granite 4 hybrids (IBM 2025): Mamba-2 in most layers, attention in few, mostly without a rope.

It has the multipliers of Granite 3. A layer has experts and a shared MLP, or the latter alone.
Checkpoints hold the experts of a layer in one tensor, (E, 2 · I, H) and (E, H, I), gates before
ups.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from headway.runtime.layers import Build, GatedMLP
from headway.runtime.models.decoder import Architecture, Pieces, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import EXPERTS
from headway.runtime.models.qwen3_next import HybridLayer, parts_of_experts
from headway.runtime.models.qwen3_next import pieces as bare_pieces

THEIRS, OURS = LAYER + "mamba.", "layers.{i}.state."
SHARED, STACKED = LAYER + "shared_mlp.", ".block_sparse_moe."
WEIGHTS: Weights = {
    **{name: place for name, place in LLAMA_WEIGHTS.items() if ".mlp." not in name},
    **{name: place for name, place in EXPERTS.items() if name != LAYER + "mlp.gate"},
    LAYER + "block_sparse_moe.router.layer": ("layers.{i}.mlp.router", None),
    SHARED + "input_linear": ("layers.{i}.mlp.shared.gate_up", None),
    SHARED + "output_linear": ("layers.{i}.mlp.shared.down", None),
    THEIRS + "in_proj": (OURS + "project", None),
    THEIRS + "conv1d": (OURS + "convolution", None),
    THEIRS + "A_log": (OURS + "decay_log", None),
    THEIRS + "dt_bias": (OURS + "step_bias", None),
    THEIRS + "D": (OURS + "skip", None),
    THEIRS + "norm": (OURS + "scale", None),
    THEIRS + "out_proj": (OURS + "out", None),
}


class SharedMLP(nn.Module):
    """The MLP of a layer without experts, in the place of the shared MLP of other layers."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.shared = GatedMLP(build)

    def forward(self, x_TH: Tensor) -> Tensor:
        out_TH: Tensor = self.shared(x_TH)
        return out_TH


class GraniteHybridLayer(HybridLayer):
    def dense(self, build: Build) -> nn.Module:
        return SharedMLP(build)


def pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Split stacked experts into matrices of each; other tensors keep their names."""
    base, stacked, last = name.partition(STACKED)
    if not stacked or last not in ("input_linear.weight", "output_linear.weight"):
        return bare_pieces(name, shape)
    return parts_of_experts(f"{base}.mlp.experts", shape(), last == "input_linear.weight")


GRANITE_HYBRID = Architecture(GraniteHybridLayer, WEIGHTS, pieces)
