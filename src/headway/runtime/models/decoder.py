"""What all decoders share: embedding, a stack of layers, a last norm, the head.

An architecture is a layer and the names of its weights; the numbers come from the spec.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.runtime.layers import Build, Linear, ResidualLayer, RMSNorm, Step
from headway.runtime.parallel.halves import drop_other_half
from headway.runtime.parallel.vocabulary import VocabEmbedding, VocabHead

Weights = dict[str, tuple[str, str | None]]
"""Checkpoint module → (our module, its part of the rows there); `.weight` and `.bias` follow."""


Pieces = list[tuple[str, Callable[[Tensor], Tensor]]]
"""Of a tensor of a checkpoint: (name of ours, function that cuts it out) of each that it holds."""


def whole(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """The tensor as it is."""
    return [(name, lambda tensor: tensor)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to make layer i, and the table of weights.

    `pieces` gives the tensors of a checkpoint the names of that table, where it has others;
    `decoder` is another than `Decoder` where more than one stream goes through the layers.
    """

    layer: Callable[[Build, int], nn.Module]
    weights: Weights
    pieces: Callable[[str, Callable[[], Sequence[int]]], Pieces] = whole
    decoder: "Callable[[Build, Architecture], Decoder] | None" = None


def embedding(build: Build) -> nn.Module:
    """The rows of all tokens, or of a rank's; a stage behind the first is given rows."""
    if not build.stage.is_first:
        return nn.Identity()
    if build.group.size > 1:
        return VocabEmbedding(build)
    shape = build.spec.vocab_size, build.spec.hidden_size
    return nn.Embedding(*shape, _weight=build.weight(*shape), _freeze=True)


def head(build: Build) -> nn.Module:
    """The output matrix, or a rank's rows of it; of a pipeline the last stage's."""
    if not build.stage.is_last:
        return nn.Identity()
    if build.group.size > 1:
        return VocabHead(build)
    return Linear(build, build.spec.hidden_size, build.spec.vocab_size)


class Decoder(nn.Module):
    """Token ids in, hidden states out; `logits` applies the head to the rows that need it."""

    def __init__(self, build: Build, architecture: Architecture) -> None:
        super().__init__()
        spec = build.spec
        self.spec = spec
        self.weights = architecture.weights
        self.stage, self.own = build.stage, build.stage.layers(spec.num_layers)
        self.own_experts = build.own_experts
        self.embedding: Any = embedding(build)
        self.layers = nn.ModuleList(
            architecture.layer(build, i) if i in self.own else nn.Identity()
            for i in range(spec.num_layers)
        )
        self.norm: Any = RMSNorm(build) if self.stage.is_last else nn.Identity()
        self.head: Any = head(build)
        if spec.tied and self.stage.count == 1:
            self.head.weight = self.embedding.weight
        if self.stage.half is not None:
            drop_other_half(self, self.stage.half)

    def forward(self, given: Tensor, step: Step) -> Tensor:
        """`given` are token ids (T,), or in a stage behind the first its rows (T, H)."""
        return self.run_layers(self.embed(given), step)

    def embed(self, given: Tensor) -> Tensor:
        """What the first layer reads, (T, H)."""
        x_TH: Tensor = self.embedding(given)
        if self.stage.is_first and self.spec.embedding_scale != 1.0:
            x_TH = x_TH * torch.tensor(self.spec.embedding_scale, dtype=x_TH.dtype)
        return x_TH

    def run_layers(self, x_TH: Tensor, step: Step) -> Tensor:
        """The layers that are here; a sum behind an MLP is left to the norm that reads it."""
        more_TH: Tensor | None = None
        for index in self.own:
            layer = self.layers[index]
            if isinstance(layer, ResidualLayer):
                x_TH, more_TH = layer.forward_residual(x_TH, more_TH, step)
                continue
            if more_TH is not None:
                x_TH, more_TH = x_TH + more_TH, None
            x_TH = layer(x_TH, step)
        return x_TH if more_TH is None else x_TH + more_TH

    def logits(self, x_RH: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits of these rows, (R, vocab), in fp32.

        `head` may stand in for the model's: a part of it, say.
        """
        return self.logits_of(self.norm(x_RH), head)

    def logits_of(self, x_RH: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The same of rows that the last norm has given.

        The head is given its rows in fp32, so it gives fp32: in bf16 a logit of 16 to 32 would be
        a multiple of 1/8, and so would differences of log-probabilities.
        """
        logits_RV: Tensor = (head or self.head)(x_RH.float())
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV * self.spec.logits_scale
        if self.spec.logits_softcap:
            cap = self.spec.logits_softcap
            logits_RV = cap * torch.tanh(logits_RV / cap)
        return logits_RV
