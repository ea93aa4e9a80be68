"""gpt-oss (OpenAI 2025): Llama with sink logits, a window in every other layer, and experts.

Its checkpoints hold the experts of a layer in one tensor, with gates and ups interleaved: in 16
bits (E, H, 2 · I), inputs before outputs, in MXFP4 `…_blocks` (E, 2 · I, H / 32, 16) and `…_scales`
(E, 2 · I, H / 32). They are read as matrices of each expert.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from headway.runtime.models.decoder import Architecture, Pieces, Weights, whole
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
SUFFIXES = {"": "weight", "bias": "bias", "blocks": "blocks", "scales": "scales"}
"""Suffix of a stacked tensor → suffix of the tensor of one expert."""


def by_expert(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Split `mlp.experts.gate_up_proj` into `mlp.experts.0.gate_proj.weight` and the like.

    A stacked tensor is a view of its file: only one matrix is copied at a time.
    """
    base, experts, last = name.partition(".mlp.experts.")
    kind = next((kind for kind in PARTS if last.startswith(kind)), "")
    suffix = SUFFIXES.get(last.removeprefix(kind).removeprefix("_"))
    if name.endswith(".self_attn.sinks"):
        return [(f"{name}.weight", lambda sinks: sinks)]
    if not experts or not kind or suffix is None:
        return whole(name, shape)
    return [
        (
            f"{base}.mlp.experts.{expert}.{part}.{suffix}",
            partial(outputs_of, expert=expert, first=first, step=step, turned=suffix == "weight"),
        )
        for expert in range(shape()[0])
        for part, first, step in PARTS[kind]
    ]


def outputs_of(stacked: Tensor, expert: int, first: int, step: int, turned: bool) -> Tensor:
    """Return every `step`-th output of an expert from `first` on; `turned`: inputs are first."""
    matrix = stacked[expert].t() if turned else stacked[expert]
    return matrix[first::step]


GPT_OSS = Architecture(SparseLayer, WEIGHTS, by_expert)
