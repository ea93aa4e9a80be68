"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention in few.

Layers behind the first ones have experts in an LFM2-MoE.
"""

from collections.abc import Callable, Sequence

from headway.runtime.models.decoder import Architecture, Pieces, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.qwen3_next import HybridLayer
from headway.runtime.models.qwen3_next import pieces as bare_pieces

ATTENTION, STATE, MLP = LAYER + "self_attn.", LAYER + "conv.", LAYER + "feed_forward."
WEIGHTS: Weights = {
    "model.embed_tokens": ("embedding", None),
    LAYER + "operator_norm": ("layers.{i}.attention_norm", None),
    ATTENTION + "q_proj": ("layers.{i}.attention.qkv", "q"),
    ATTENTION + "k_proj": ("layers.{i}.attention.qkv", "k"),
    ATTENTION + "v_proj": ("layers.{i}.attention.qkv", "v"),
    ATTENTION + "q_layernorm": ("layers.{i}.attention.q_norm", None),
    ATTENTION + "k_layernorm": ("layers.{i}.attention.k_norm", None),
    ATTENTION + "out_proj": ("layers.{i}.attention.out", None),
    STATE + "in_proj": ("layers.{i}.state.project", None),
    STATE + "conv": ("layers.{i}.state.convolution", None),
    STATE + "out_proj": ("layers.{i}.state.out", None),
    LAYER + "ffn_norm": ("layers.{i}.mlp_norm", None),
    MLP + "w1": ("layers.{i}.mlp.gate_up", "gate"),
    MLP + "w3": ("layers.{i}.mlp.gate_up", "up"),
    MLP + "w2": ("layers.{i}.mlp.down", None),
    MLP + "gate": ("layers.{i}.mlp.router", None),
    MLP + "expert_bias": ("layers.{i}.mlp.correction", None),
    MLP + "experts.{e}.w1": ("layers.{i}.mlp.gate_up", "gate"),
    MLP + "experts.{e}.w3": ("layers.{i}.mlp.gate_up", "up"),
    MLP + "experts.{e}.w2": ("layers.{i}.mlp.down", None),
    "model.embedding_norm": ("norm", None),
    "lm_head": ("head", None),
}


def pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Return the tensor under its name; (C, 1, W) of a convolution becomes (C, W)."""
    if name.endswith(".conv.conv.weight"):
        return [(name, lambda weight: weight.flatten(1))]
    return bare_pieces(name, shape)


LFM2 = Architecture(HybridLayer, WEIGHTS, pieces)
