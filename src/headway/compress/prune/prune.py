"""Pruning in order: layers, then heads, then neurons, then single weights.

Each step uses the inputs that the previous ones leave, layer by layer from the first: a loss in one
layer shows in the inputs of the later layers, which compensate for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headway.compress.prune.masks import METHODS, Pattern
from headway.compress.prune.smaller import (
    RemainingUnits,
    divides,
    heads_of_kv,
    smaller_config,
    smaller_model,
    spread,
)
from headway.compress.prune.structure import remove_units
from headway.compress.statistics import Moments, collect_moments
from headway.compress.train.distill import divergence
from headway.compress.train.model import TrainedModel, check_trainable
from headway.core.errors import UnsupportedModelError, UsageError
from headway.spec import ModelSpec

NEURON_MULTIPLE = 32
"""An MLP keeps a multiple of this if its size was one: whole panels and groups."""
LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
ROWS_AT_ONCE = 4
MAX_POSITIONS = 2048
"""Maximum number of tokens whose distributions are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSettings:
    """Amount to remove: layers, KV heads with their query heads, query heads of each KV head, a
    share of each MLP's neurons, a pattern of single weights.
    """

    layers: int = 0
    kv_heads: int = 0
    heads: int = 0
    neurons: float = 0.0
    pattern: Pattern | None = None
    method: str = "sparsegpt"

    @property
    def is_smaller(self) -> bool:
        """Whether sizes change, and not only zeros."""
        return bool(self.layers or self.kv_heads or self.heads or self.neurons)

    def remaining_neurons(self, spec: ModelSpec) -> int:
        """Return the remaining neurons: of 512 without a third 352, the nearest multiple of 32 to
        341."""
        exact = spec.intermediate_size * (1 - self.neurons)
        unit = NEURON_MULTIPLE if spec.intermediate_size % NEURON_MULTIPLE == 0 else 1
        return max(unit, round(exact / unit) * unit)


@dataclass(slots=True)
class Pruned:
    """The pruned model, its config, and the share of zeros by kind of linear layer."""

    model: TrainedModel
    config: dict[str, Any]
    zeros: dict[str, float] = field(default_factory=dict)


def check(spec: ModelSpec, settings: PruneSettings) -> None:
    """Raise HeadwayError that names what cannot be removed, before any computation."""
    check_trainable(spec)
    if spec.formats:
        raise UnsupportedModelError(
            "The folder is quantized: what is pruned is written in 16 bits.",
            "Prune the folder it was made of, then `headway quantize` what is left.",
        )
    if not settings.is_smaller and settings.pattern is None:
        raise UsageError(
            "Nothing is to be removed.",
            "Give --neurons, --kv-heads, --heads, --layers, --sparsity or --pattern.",
        )
    group = spec.num_heads // spec.num_kv_heads
    for name, count, there in (
        ("--layers", settings.layers, spec.num_layers),
        ("--kv-heads", settings.kv_heads, spec.num_kv_heads),
        ("--heads", settings.heads, group),
    ):
        if count >= there:
            raise UsageError(
                f"{name} {count}: there are {there}{' for each KV head' * (name == '--heads')}, "
                "and one must stay.",
                f"Remove at most {there - 1}." if there > 1 else f"Leave {name} out.",
            )
    num_heads = (spec.num_kv_heads - settings.kv_heads) * (group - settings.heads)
    if not divides(spec, num_heads):
        raise UsageError(
            f"{num_heads} heads would be left, which do not divide the hidden size "
            f"{spec.hidden_size}: transformers does not read such a {spec.architecture}.",
            "Remove another number of heads.",
        )
    if (settings.heads or settings.kv_heads) and spec.qk_norm == "row":
        raise UnsupportedModelError(
            f"{spec.architecture} norms all of its heads together: without one the others change.",
            "Remove neurons or layers.",
        )
    if settings.neurons and settings.remaining_neurons(spec) >= spec.intermediate_size:
        raise UsageError(
            f"--neurons {settings.neurons:g} of {spec.intermediate_size} is less than "
            f"{NEURON_MULTIPLE} neurons.", "Remove a larger share.",
        )  # fmt: skip


def num_steps(spec: ModelSpec, settings: PruneSettings) -> int:
    """Return how often `prune` calls `advance`."""
    remaining = spec.num_layers - settings.layers
    steps = sum(spec.num_layers - gone for gone in range(settings.layers))
    units = bool(settings.kv_heads or settings.heads or settings.neurons)
    return steps + remaining * (units + (settings.pattern is not None))


@torch.no_grad()
def prune(
    model: TrainedModel,
    config: dict[str, Any],
    generation: dict[str, Any],
    rows_BT: Tensor,
    settings: PruneSettings,
    advance: Callable[[], None] = lambda: None,
) -> Pruned:
    """Return the pruned model; `model` is modified. `rows_BT` give the input statistics."""
    check(model.spec, settings)
    if settings.layers:
        remaining = RemainingUnits.whole(model.spec)
        remaining.layers = choose_layers(model, rows_BT, settings.layers, advance)
        config = smaller_config(config, model.spec, remaining)
        model = smaller_model(model, remaining, config, generation)
    if settings.kv_heads or settings.heads or settings.neurons:
        remaining = choose_units(model, rows_BT, settings, advance)
        config = smaller_config(config, model.spec, remaining)
        model = smaller_model(model, remaining, config, generation)
    if settings.pattern is not None:
        zero_weights(model, rows_BT, settings, advance)
    return Pruned(model, config, zeros_of(model))


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


def choose_units(
    model: TrainedModel, rows_BT: Tensor, settings: PruneSettings, advance: Callable[[], None]
) -> RemainingUnits:
    """Select remaining units of each layer; zero the others' columns in `model`, with
    compensation."""
    spec, remaining = model.spec, RemainingUnits.whole(model.spec)
    x_TH = embed(model, rows_BT)
    for index, layer in enumerate(model.decoder.layers):
        if settings.kv_heads:
            size = spec.num_heads // spec.num_kv_heads * spec.head_dim
            stay = remove_from(
                model, layer, "attention.out", x_TH, rows_BT, size, settings.kv_heads
            )
            remaining.kv_heads[index] = stay
            remaining.heads[index] = heads_of_kv(spec, stay.tolist())
        if settings.heads:
            remaining.heads[index] = remove_heads(
                model, layer, x_TH, rows_BT, settings, remaining, index
            )
        if settings.neurons:
            count = spec.intermediate_size - settings.remaining_neurons(spec)
            remaining.neurons[index] = remove_from(
                model, layer, "mlp.down", x_TH, rows_BT, 1, count
            )
        x_TH = run(model, layer, x_TH, rows_BT)
        advance()
    return remaining


def remove_from(
    model: TrainedModel,
    layer: nn.Module,
    name: str,
    x_TH: Tensor,
    rows_BT: Tensor,
    size: int,
    count: int,
) -> Tensor:
    """Remove units from the inputs of one linear layer; return the remaining ones."""
    weight_OI = linear_of(layer, name)
    hessian = moments(model, layer, x_TH, rows_BT)[name, None].hessian()
    stay, weight = remove_units(weight_OI, hessian, size, count)
    weight_OI.copy_(weight)
    return stay


def remove_heads(
    model: TrainedModel,
    layer: nn.Module,
    x_TH: Tensor,
    rows_BT: Tensor,
    settings: PruneSettings,
    remaining: RemainingUnits,
    index: int,
) -> Tensor:
    """Remove query heads, the same number for each KV head; return the remaining ones."""
    spec = model.spec
    weight_OI = linear_of(layer, "attention.out")
    hessian = moments(model, layer, x_TH, rows_BT)["attention.out", None].hessian()
    here = remaining.heads[index]
    columns = spread(here, spec.head_dim)
    stay, weight = remove_units(
        weight_OI[:, columns], hessian[columns][:, columns], spec.head_dim, settings.heads,
        classes=len(remaining.kv_heads[index]),
    )  # fmt: skip
    weight_OI[:, columns] = weight
    return here[stay]


def zero_weights(
    model: TrainedModel, rows_BT: Tensor, settings: PruneSettings, advance: Callable[[], None]
) -> None:
    """Zero weights of every linear layer but the head."""
    assert settings.pattern is not None
    x_TH = embed(model, rows_BT)
    for layer in model.decoder.layers:
        counted = moments(model, layer, x_TH, rows_BT)
        for name in LINEARS:
            weight_OI = linear_of(layer, name)
            hessian = counted[name, None].hessian()
            weight_OI.copy_(METHODS[settings.method](weight_OI, hessian, settings.pattern))
        x_TH = run(model, layer, x_TH, rows_BT)
        advance()


def linear_of(layer: nn.Module, name: str) -> Tensor:
    """Return the weight of one of a layer's linear layers, (O, I)."""
    weight = layer.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def moments(
    model: TrainedModel, layer: nn.Module, x_TH: Tensor, rows_BT: Tensor
) -> dict[tuple[str, int | None], Moments]:
    """Return input statistics of the linear layers of `layer` over all rows."""
    with collect_moments(layer) as counted:
        run(model, layer, x_TH, rows_BT)
    return counted


def run(model: TrainedModel, layer: nn.Module, x_TH: Tensor, rows_BT: Tensor) -> Tensor:
    """Run `layer` on all rows, ROWS_AT_ONCE at a time."""
    length = rows_BT.shape[1]
    parts = x_TH.split(ROWS_AT_ONCE * length)
    return torch.cat([layer(part, model.step(len(part) // length, length)) for part in parts])


def zeros_of(model: TrainedModel) -> dict[str, float]:
    """Return kind of linear layer → share of zeros among its weights, over all layers."""
    shares = {}
    for name in LINEARS:
        weights = [linear_of(layer, name) for layer in model.decoder.layers]
        shares[name] = sum(float((w == 0).float().mean()) for w in weights) / len(weights)
    return shares
