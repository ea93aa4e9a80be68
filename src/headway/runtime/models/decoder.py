"""What all decoders share: embedding, a stack of layers, a last norm, the head.

An architecture is a layer and the names of its weights; the numbers come from the spec.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.runtime.layers import Build, Linear, RMSNorm, Step

Weights = dict[str, tuple[str, str | None]]
"""Checkpoint module → (our module, its part of the rows there); `.weight` and `.bias` follow."""


Tensors = Iterator[tuple[str, Callable[[], Any]]]
"""(name, function that reads it) of each tensor of a checkpoint."""


def same(tensors: Tensors) -> Tensors:
    """The tensors as they are."""
    return tensors


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to make layer i, and the table of weights.

    `plain` gives the tensors of a checkpoint the names of that table, where it has others.
    """

    layer: Callable[[Build, int], nn.Module]
    weights: Weights
    plain: Callable[[Tensors], Tensors] = same


class Decoder(nn.Module):
    """Token ids in, hidden states out; `logits` applies the head to the rows that need it."""

    def __init__(self, build: Build, architecture: Architecture) -> None:
        super().__init__()
        spec = build.spec
        self.spec = spec
        self.weights = architecture.weights
        self.embedding = nn.Embedding(
            spec.vocab_size,
            spec.hidden_size,
            _weight=build.weight(spec.vocab_size, spec.hidden_size),
            _freeze=True,
        )
        self.layers = nn.ModuleList(architecture.layer(build, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(build)
        self.head = Linear(build, spec.hidden_size, spec.vocab_size)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, token_ids_T: Tensor, step: Step) -> Tensor:
        x_TH = self.embedding(token_ids_T)
        if self.spec.embedding_scale != 1.0:
            x_TH = x_TH * torch.tensor(self.spec.embedding_scale, dtype=x_TH.dtype)
        for layer in self.layers:
            x_TH = layer(x_TH, step)
        return x_TH

    def logits(self, x_RH: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits of these rows, (R, vocab): as the head gives them, or changed, in fp32.

        `head` may stand in for the model's: a part of it, say.
        """
        return self.logits_of(self.norm(x_RH), head)

    def logits_of(self, x_RH: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The same of rows that the last norm has given."""
        logits_RV: Tensor = (head or self.head)(x_RH)
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV.float() * self.spec.logits_scale
        if self.spec.logits_softcap:
            cap = self.spec.logits_softcap
            logits_RV = cap * torch.tanh(logits_RV.float() / cap)
        return logits_RV
