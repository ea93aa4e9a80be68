"""Phi-3 (Abdin et al. 2024): a Llama with fused matrices in the checkpoint.

Phi-4-mini, of the same architecture, rotates three quarters of each head.
"""

from headway.runtime.models.decoder import Architecture, Weights
from headway.runtime.models.llama import LAYER, LlamaLayer
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS

WEIGHTS: Weights = {
    **{name: place for name, place in LLAMA_WEIGHTS.items() if place[1] is None},
    LAYER + "self_attn.qkv_proj": ("layers.{i}.attention.qkv", None),
    LAYER + "mlp.gate_up_proj": ("layers.{i}.mlp.gate_up", None),
}

PHI3 = Architecture(LlamaLayer, WEIGHTS)
