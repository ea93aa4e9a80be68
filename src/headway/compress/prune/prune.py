"""From what is wanted to a smaller model: layers, then heads, then neurons, then single weights.

Each step is judged on what the steps before have left, layer by layer from the first: what a layer
loses shows in the inputs of those behind it, and they make good what they can.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headway.compress.prune.layers import choose_layers, embed
from headway.compress.prune.masks import METHODS, Pattern
from headway.compress.prune.smaller import (
    Kept,
    divides,
    kept_heads,
    smaller_config,
    smaller_model,
    spread,
)
from headway.compress.prune.structure import remove_units
from headway.compress.statistics import Moments, counting
from headway.compress.train.model import TrainedModel, refuse_experts
from headway.core.errors import UnsupportedModelError, UsageError
from headway.spec import ModelSpec

ROUND_NEURONS = 32
"""What is left of an MLP is a multiple of it where it was before: whole panels and groups."""
LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How much is to go: counts of whole layers, KV heads with their query heads, query heads of
    each KV head; a share of each MLP's neurons; a pattern of single weights."""

    layers: int = 0
    kv_heads: int = 0
    heads: int = 0
    neurons: float = 0.0
    pattern: Pattern | None = None
    method: str = "sparsegpt"

    @property
    def is_smaller(self) -> bool:
        """Whether sizes change, and not zeros alone."""
        return bool(self.layers or self.kv_heads or self.heads or self.neurons)

    def neurons_left(self, spec: ModelSpec) -> int:
        """Of 512 with a third gone 352: the nearest multiple of 32, 341 is none."""
        exact = spec.intermediate_size * (1 - self.neurons)
        unit = ROUND_NEURONS if spec.intermediate_size % ROUND_NEURONS == 0 else 1
        return max(unit, round(exact / unit) * unit)


@dataclass(slots=True)
class Pruned:
    """The smaller model, its config, and the share of zeros among the weights of its layers."""

    model: TrainedModel
    config: dict[str, Any]
    zeros: dict[str, float] = field(default_factory=dict)


def check(spec: ModelSpec, wanted: Wanted) -> None:
    """HeadwayError that names what cannot be removed, before anything is computed."""
    refuse_experts(spec)
    if spec.formats:
        raise UnsupportedModelError(
            "The folder is quantized: what is pruned is written in 16 bits.",
            "Prune the folder it was made of, then `headway quantize` what is left.",
        )
    if not wanted.is_smaller and wanted.pattern is None:
        raise UsageError(
            "Nothing is to be removed.",
            "Give --neurons, --kv-heads, --heads, --layers, --sparsity or --pattern.",
        )
    group = spec.num_heads // spec.num_kv_heads
    for name, count, there in (
        ("--layers", wanted.layers, spec.num_layers),
        ("--kv-heads", wanted.kv_heads, spec.num_kv_heads),
        ("--heads", wanted.heads, group),
    ):
        if count >= there:
            raise UsageError(
                f"{name} {count}: there are {there}{' for each KV head' * (name == '--heads')}, "
                "and one must stay.",
                f"Remove at most {there - 1}." if there > 1 else f"Leave {name} out.",
            )
    num_heads = (spec.num_kv_heads - wanted.kv_heads) * (group - wanted.heads)
    if not divides(spec, num_heads):
        raise UsageError(
            f"{num_heads} heads would be left, which do not divide the hidden size "
            f"{spec.hidden_size}: transformers does not read such a {spec.architecture}.",
            "Remove another number of heads.",
        )
    if (wanted.heads or wanted.kv_heads) and spec.qk_norm == "row":
        raise UnsupportedModelError(
            f"{spec.architecture} norms all of its heads together: without one the others change.",
            "Remove neurons or layers.",
        )
    if wanted.neurons and wanted.neurons_left(spec) >= spec.intermediate_size:
        raise UsageError(
            f"--neurons {wanted.neurons:g} of {spec.intermediate_size} is less than "
            f"{ROUND_NEURONS} neurons.", "Remove a larger share.",
        )  # fmt: skip


def num_steps(spec: ModelSpec, wanted: Wanted) -> int:
    """How often `prune` calls its `advance`."""
    left = spec.num_layers - wanted.layers
    steps = sum(spec.num_layers - gone for gone in range(wanted.layers))
    units = bool(wanted.kv_heads or wanted.heads or wanted.neurons)
    return steps + left * (units + (wanted.pattern is not None))


@torch.no_grad()
def prune(
    model: TrainedModel,
    config: dict[str, Any],
    generation: dict[str, Any],
    rows_BT: Tensor,
    wanted: Wanted,
    advance: Callable[[], None] = lambda: None,
) -> Pruned:
    """The pruned model; `model` is changed on the way. `rows_BT` are what inputs are judged by."""
    check(model.spec, wanted)
    if wanted.layers:
        kept = Kept.all_of(model.spec)
        kept.layers = choose_layers(model, rows_BT, wanted.layers, advance)
        config = smaller_config(config, model.spec, kept)
        model = smaller_model(model, kept, config, generation)
    if wanted.kv_heads or wanted.heads or wanted.neurons:
        kept = choose_units(model, rows_BT, wanted, advance)
        config = smaller_config(config, model.spec, kept)
        model = smaller_model(model, kept, config, generation)
    if wanted.pattern is not None:
        zero_weights(model, rows_BT, wanted, advance)
    return Pruned(model, config, zeros_of(model))


def choose_units(
    model: TrainedModel, rows_BT: Tensor, wanted: Wanted, advance: Callable[[], None]
) -> Kept:
    """What stays of each layer; the columns of the others are zero and made good in `model`."""
    spec, kept = model.spec, Kept.all_of(model.spec)
    x_TH = embed(model, rows_BT)
    for index, layer in enumerate(model.decoder.layers):
        if wanted.kv_heads:
            size = spec.num_heads // spec.num_kv_heads * spec.head_dim
            stay = remove_from(model, layer, "attention.out", x_TH, rows_BT, size, wanted.kv_heads)
            kept.kv_heads[index] = stay
            kept.heads[index] = kept_heads(spec, stay.tolist())
        if wanted.heads:
            kept.heads[index] = remove_heads(model, layer, x_TH, rows_BT, wanted, kept, index)
        if wanted.neurons:
            count = spec.intermediate_size - wanted.neurons_left(spec)
            kept.neurons[index] = remove_from(model, layer, "mlp.down", x_TH, rows_BT, 1, count)
        x_TH = run(model, layer, x_TH, rows_BT)
        advance()
    return kept


def remove_from(
    model: TrainedModel,
    layer: nn.Module,
    name: str,
    x_TH: Tensor,
    rows_BT: Tensor,
    size: int,
    count: int,
) -> Tensor:
    """Take units out of the inputs of one linear layer; returns those that stay."""
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
    wanted: Wanted,
    kept: Kept,
    index: int,
) -> Tensor:
    """Take query heads out, as many of each KV head; returns those that stay."""
    spec = model.spec
    weight_OI = linear_of(layer, "attention.out")
    hessian = moments(model, layer, x_TH, rows_BT)["attention.out", None].hessian()
    here = kept.heads[index]
    columns = spread(here, spec.head_dim)
    stay, weight = remove_units(
        weight_OI[:, columns], hessian[columns][:, columns], spec.head_dim, wanted.heads,
        classes=len(kept.kv_heads[index]),
    )  # fmt: skip
    weight_OI[:, columns] = weight
    return here[stay]


def zero_weights(
    model: TrainedModel, rows_BT: Tensor, wanted: Wanted, advance: Callable[[], None]
) -> None:
    """Bring the wanted zeros into every linear layer but the head."""
    assert wanted.pattern is not None
    x_TH = embed(model, rows_BT)
    for layer in model.decoder.layers:
        counted = moments(model, layer, x_TH, rows_BT)
        for name in LINEARS:
            weight_OI = linear_of(layer, name)
            hessian = counted[name, None].hessian()
            weight_OI.copy_(METHODS[wanted.method](weight_OI, hessian, wanted.pattern))
        x_TH = run(model, layer, x_TH, rows_BT)
        advance()


def linear_of(layer: nn.Module, name: str) -> Tensor:
    """The weight of one of a layer's linear layers, (O, I)."""
    weight = layer.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def moments(
    model: TrainedModel, layer: nn.Module, x_TH: Tensor, rows_BT: Tensor
) -> dict[tuple[str, int | None], Moments]:
    """What the linear layers of `layer` read of all rows."""
    with counting(layer) as counted:
        run(model, layer, x_TH, rows_BT)
    return counted


def run(model: TrainedModel, layer: nn.Module, x_TH: Tensor, rows_BT: Tensor) -> Tensor:
    """`layer` on all rows, some at a time."""
    length = rows_BT.shape[1]
    parts = x_TH.split(ROWS_AT_ONCE * length)
    return torch.cat([layer(part, model.step(len(part) // length, length)) for part in parts])


def zeros_of(model: TrainedModel) -> dict[str, float]:
    """Kind of linear layer → the share of its weights that are zero, over all layers."""
    found = {}
    for name in LINEARS:
        weights = [linear_of(layer, name) for layer in model.decoder.layers]
        found[name] = sum(float((w == 0).float().mean()) for w in weights) / len(weights)
    return found
