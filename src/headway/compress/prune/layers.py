"""Which whole layers can go: each is left out in turn, and what the model says then is compared."""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.compress.train.distill import divergence
from headway.compress.train.model import TrainedModel

POSITIONS = 2048
"""Tokens whose distributions are compared, at most."""


@torch.no_grad()
def choose_layers(
    model: TrainedModel, rows_BT: Tensor, count: int, advance: Callable[[], None]
) -> list[int]:
    """The layers that stay, in order: one at a time goes whose loss changes the output least.

    The loss is KL from the whole model in nats a token, on the rows.
    """
    rows = rows_BT[: max(1, POSITIONS // rows_BT.shape[1])]
    taught_NV = say(model, rows, list(range(model.spec.num_layers)))
    here = list(range(model.spec.num_layers))
    for _ in range(count):
        losses = {}
        for layer in here:
            rest = [other for other in here if other != layer]
            losses[layer] = float(divergence(taught_NV, say(model, rows, rest)).mean())
            advance()
        here.remove(min(losses, key=lambda layer: losses[layer]))
    return here


def say(model: TrainedModel, rows_BT: Tensor, layers: list[int]) -> Tensor:
    """The logits behind every token, through these layers alone, (B · T, V)."""
    decoder, step = model.decoder, model.step(*rows_BT.shape)
    x_TH = embed(model, rows_BT)
    for layer in layers:
        x_TH = decoder.layers[layer](x_TH, step)
    return model.logits(x_TH)


def embed(model: TrainedModel, rows_BT: Tensor) -> Tensor:
    """What the first layer reads, (B · T, H)."""
    found: Tensor = model.decoder.embedding(rows_BT.flatten()) * model.spec.embedding_scale
    return found
