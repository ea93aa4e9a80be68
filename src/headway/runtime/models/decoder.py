"""The common part of all decoders: embedding, a stack of layers, a last norm, the head.

An architecture is a layer and the names of its weights; the dimensions come from the spec.
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
"""Module of the checkpoint → (module of the decoder, part of its rows); no `.weight` or `.bias`."""


TEXT_PART = "language_model."
"""Of a checkpoint that has parts for images or sound beside the text model."""
OTHER_PARTS = (
    *("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    *("multi_modal_projector.", "visual."),
)
Pieces = list[tuple[str, Callable[[Tensor], Tensor]]]
"""(name, function that cuts it out) of each tensor of the weight table in a checkpoint's tensor."""


def whole(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Return the tensor under its own name."""
    return [(name, lambda tensor: tensor)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model architecture: a function that makes layer i, and the table of weights.

    `pieces` maps the tensors of a checkpoint to names of that table, where they have others;
    `decoder` replaces `Decoder` where several streams go through the layers.
    """

    layer: Callable[[Build, int], nn.Module]
    weights: Weights
    pieces: Callable[[str, Callable[[], Sequence[int]]], Pieces] = whole
    decoder: "Callable[[Build, Architecture], Decoder] | None" = None

    def pieces_of(self, name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
        """Return the pieces of a checkpoint's tensor; none of parts for images and sound."""
        plain = name.removeprefix("model.")
        if plain.startswith(OTHER_PARTS):
            return []
        if plain.startswith(TEXT_PART):
            inner = plain.removeprefix(TEXT_PART).removeprefix("model.")
            name = inner if inner.startswith("lm_head.") else "model." + inner
        return self.pieces(name, shape)


def embedding(build: Build) -> nn.Module:
    """Return the embedding of all tokens or of a rank's; the first pipeline stage has it."""
    if not build.stage.is_first:
        return nn.Identity()
    if build.group.size > 1:
        return VocabEmbedding(build)
    shape = build.spec.vocab_size, build.spec.hidden_size
    return nn.Embedding(*shape, _weight=build.weight(*shape), _freeze=True)


def head(build: Build) -> nn.Module:
    """Return the output matrix or a rank's rows of it; the last pipeline stage has it."""
    if not build.stage.is_last:
        return nn.Identity()
    if build.group.size > 1:
        return VocabHead(build)
    return Linear(build, build.spec.hidden_size, build.spec.vocab_size)


class Decoder(nn.Module):
    """Maps token ids to hidden states; `logits` applies the head to rows that need it."""

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
        """Run all layers on token ids (T,), or in a later stage on rows (T, H)."""
        return self.run_layers(self.embed(given), step)

    def embed(self, given: Tensor) -> Tensor:
        """Return the input of the first layer, (T, H)."""
        x_TH: Tensor = self.embedding(given)
        if self.stage.is_first and self.spec.embedding_scale != 1.0:
            x_TH = x_TH * torch.tensor(self.spec.embedding_scale, dtype=x_TH.dtype)
        return x_TH

    def run_layers(self, x_TH: Tensor, step: Step) -> Tensor:
        """Run the layers of this stage; the last sum of a layer is left to the next norm."""
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
        """Return the logits of these rows, (R, vocab), in fp32.

        `head` replaces the model's output matrix, for example by a part of it.
        """
        return self.logits_of(self.norm(x_RH), head)

    def logits_of(self, x_RH: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits of rows that have passed the last norm.

        The head gets rows in fp32, so its logits are fp32: in bf16 a logit of 16 to 32 would be a
        multiple of 1/8, and so would differences of log-probabilities.
        """
        logits_RV: Tensor = (head or self.head)(x_RH.float())
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV * self.spec.logits_scale
        if self.spec.logits_softcap:
            cap = self.spec.logits_softcap
            logits_RV = cap * torch.tanh(logits_RV / cap)
        return logits_RV
