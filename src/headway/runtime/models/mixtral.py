"""Mixtral (Jiang et al. 2024): Llama with experts in place of the MLP, under their own names."""

from headway.runtime.models.decoder import Architecture, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import SparseLayer

SPARSE = LAYER + "block_sparse_moe."
WEIGHTS: Weights = {
    **{name: place for name, place in LLAMA_WEIGHTS.items() if ".mlp." not in name},
    SPARSE + "gate": ("layers.{i}.mlp.router", None),
    SPARSE + "experts.{e}.w1": ("layers.{i}.mlp.gate_up", "gate"),
    SPARSE + "experts.{e}.w3": ("layers.{i}.mlp.gate_up", "up"),
    SPARSE + "experts.{e}.w2": ("layers.{i}.mlp.down", None),
}

MIXTRAL = Architecture(SparseLayer, WEIGHTS)
