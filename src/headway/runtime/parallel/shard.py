"""The part of each weight that a rank reads: a view of the mapped file, so nothing else is read.

A rank's columns are rows of the stored matrix, which is (outputs, inputs):

    qkv, gate_up     outputs by head or neuron, the same of each part     bias likewise
    out, down        inputs of its heads or neurons                       bias whole, on one rank
    embedding, head  rows by token
    sink_logits      by head; experts whole, each on one rank
    all else         whole
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headway.config.parallel import Cut, bounds
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec

Range = tuple[int, int]
Weight = Tensor | RoundedWeight


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` of the model `spec`, which is cut as `cut` says."""

    spec: ModelSpec
    cut: Cut | None = None
    rank: int = 0
    size: int = 1

    def of(self, weight: Weight, module: str, part: str | None) -> Weight:
        """Return the rank's piece of a weight; `part` as in the model's table of weights."""
        if self.size == 1 or self.cut is None:
            return weight
        _, _, layer = module.rpartition(".")
        if layer in ("embedding", "head"):
            ends = bounds(self.spec.vocab_size, self.size)
            return rows(weight, ends[self.rank], ends[self.rank + 1])
        ranges = self.ranges(self.cut)
        if layer == "sink_logits":
            return rows(weight, *(at // self.spec.head_dim for at in ranges["q"]))
        if layer in ("out", "down"):
            return columns(weight, *ranges["q" if layer == "out" else "up"])
        sizes = self.part_sizes(layer)
        if not sizes:
            return weight
        if part is not None:
            return rows(weight, *ranges[part])
        if num_rows(weight) != sum(sizes.values()):
            return weight  # its shape is refused when the parameter is filled
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        pieces = [
            rows(weight, begin + ranges[name][0], begin + ranges[name][1])
            for name, begin in begins.items()
        ]
        rounded = [piece for piece in pieces if isinstance(piece, RoundedWeight)]
        plain = [piece for piece in pieces if isinstance(piece, Tensor)]
        return RoundedWeight.joined(rounded) if rounded else torch.cat(plain)

    def ranges(self, cut: Cut) -> dict[str, Range]:
        """Return the rank's rows of each part of a layer."""
        first, end = (head * self.spec.head_dim for head in cut.kv_heads)
        neurons = cut.neurons[0], cut.neurons[-1]
        q = cut.q[0], cut.q[-1]
        return {"q": q, "k": (first, end), "v": (first, end), "gate": neurons, "up": neurons}

    def part_sizes(self, layer: str) -> dict[str, int]:
        """Return the outputs of each part of a layer; {} if it is not cut by outputs."""
        inner, q, kv = self.spec.intermediate_size, self.spec.q_size, self.spec.kv_size
        sizes = {"qkv": {"q": q, "k": kv, "v": kv}, "gate_up": {"gate": inner, "up": inner}}
        return sizes.get(layer, {})


def num_rows(weight: Weight) -> int:
    """Return the outputs of a matrix."""
    return len(weight.levels_OH if isinstance(weight, RoundedWeight) else weight)


def rows(weight: Weight, begin: int, end: int) -> Weight:
    """Return the outputs begin … end - 1."""
    some = slice(begin, end)
    return weight.rows(some) if isinstance(weight, RoundedWeight) else weight[some]


def columns(weight: Weight, begin: int, end: int) -> Weight:
    """Return the inputs begin … end - 1 of a matrix; a bias is returned whole."""
    if isinstance(weight, RoundedWeight):
        return weight.columns(slice(begin, end))
    return weight[:, begin:end] if weight.dim() == 2 else weight
