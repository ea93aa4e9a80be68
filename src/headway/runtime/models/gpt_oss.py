"""gpt-oss (OpenAI 2025): Llama with sink logits, a window in every other layer, and experts.

Its checkpoints hold the experts of a layer in one tensor, inputs before outputs, gates and ups in
turn: (E, H, 2 · I). They are read as if each expert had matrices of its own.
"""

from functools import partial

from torch import Tensor

from headway.runtime.models.decoder import Architecture, Tensors, Weights
from headway.runtime.models.llama import LAYER
from headway.runtime.models.llama import WEIGHTS as LLAMA_WEIGHTS
from headway.runtime.models.qwen3 import EXPERTS, SparseLayer

WEIGHTS: Weights = {
    **{name: place for name, place in LLAMA_WEIGHTS.items() if ".mlp." not in name},
    **{name: place for name, place in EXPERTS.items() if name != LAYER + "mlp.gate"},
    LAYER + "mlp.router": ("layers.{i}.mlp.router", None),
    LAYER + "self_attn.sinks": ("layers.{i}.attention.sink_logits", None),
}
PARTS = {
    "gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)),
    "down_proj": (("down_proj", 0, 1),),
}
"""Stacked tensor → its matrices: (name, first output, step)."""


def by_expert(tensors: Tensors) -> Tensors:
    """`mlp.experts.gate_up_proj` as `mlp.experts.0.gate_proj.weight`, `…0.up_proj.weight`, ….

    A stacked tensor is a view of its file: no more than a matrix is copied at once.
    """
    for name, read in tensors:
        base, experts, last = name.partition(".mlp.experts.")
        kind = last.removesuffix("_bias")
        if name.endswith(".self_attn.sinks"):
            yield f"{name}.weight", read
        elif not experts or kind not in PARTS:
            yield name, read
        else:
            stacked = read()
            suffix = "bias" if last != kind else "weight"
            for expert, matrix in enumerate(stacked):
                for part, first, step in PARTS[kind]:
                    full = f"{base}.mlp.experts.{expert}.{part}.{suffix}"
                    yield full, partial(outputs_of, matrix, first, step)


def outputs_of(matrix: Tensor, first: int, step: int) -> Tensor:
    """Every `step`-th output from `first` on, outputs before inputs: (H, O) → (O / step, H)."""
    return matrix[..., first::step].t() if matrix.dim() == 2 else matrix[first::step]


GPT_OSS = Architecture(SparseLayer, WEIGHTS, by_expert)
