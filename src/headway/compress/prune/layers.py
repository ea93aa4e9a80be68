"""Selection of layers to remove, by the change of the model's output without them."""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.compress.train.distill import divergence
from headway.compress.train.model import TrainedModel

MAX_POSITIONS = 2048
"""Maximum number of tokens whose distributions are compared."""


@torch.no_grad()
def choose_layers(
    model: TrainedModel, rows_BT: Tensor, count: int, advance: Callable[[], None]
) -> list[int]:
    """Return the layers that stay, in order; the layer with the least loss is removed each time.

    The loss is the KL from the whole model in nats per token, on the rows.
    """
    rows = rows_BT[: max(1, MAX_POSITIONS // rows_BT.shape[1])]
    taught_NV = logits_through(model, rows, list(range(model.spec.num_layers)))
    here = list(range(model.spec.num_layers))
    for _ in range(count):
        losses = {}
        for layer in here:
            rest = [other for other in here if other != layer]
            losses[layer] = float(divergence(taught_NV, logits_through(model, rows, rest)).mean())
            advance()
        here.remove(min(losses, key=lambda layer: losses[layer]))
    return here


def logits_through(model: TrainedModel, rows_BT: Tensor, layers: list[int]) -> Tensor:
    """Return the logits after every token, through these layers only, (B · T, V)."""
    decoder, step = model.decoder, model.step(*rows_BT.shape)
    x_TH = embed(model, rows_BT)
    for layer in layers:
        x_TH = decoder.layers[layer](x_TH, step)
    return model.logits(x_TH)


def embed(model: TrainedModel, rows_BT: Tensor) -> Tensor:
    """Return the input of the first layer, (B · T, H)."""
    hidden_TH: Tensor = model.decoder.embedding(rows_BT.flatten()) * model.spec.embedding_scale
    return hidden_TH
