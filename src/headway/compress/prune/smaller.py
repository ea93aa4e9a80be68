"""The smaller model: its config.json, and the remaining weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.compress.train.model import TrainedModel
from headway.spec import ModelSpec
from headway.spec.read import spec_from_config
from headway.spec.rope import FULL, WINDOW

LLAMA = "LlamaForCausalLM"
HEADS_DIVIDE_HIDDEN = (LLAMA, "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Families for which transformers requires that the number of heads divides the hidden size."""
AS_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
"""The same model under a name that allows any number of heads."""


@dataclass(slots=True)
class RemainingUnits:
    """Remaining layers, and the remaining query heads, KV heads and neurons of each, by number."""

    layers: list[int]
    heads: list[Tensor] = field(default_factory=list)
    kv_heads: list[Tensor] = field(default_factory=list)
    neurons: list[Tensor] = field(default_factory=list)

    @staticmethod
    def whole(spec: ModelSpec) -> "RemainingUnits":
        """Return all units of a model."""
        count = spec.num_layers
        return RemainingUnits(
            layers=list(range(count)),
            heads=[torch.arange(spec.num_heads)] * count,
            kv_heads=[torch.arange(spec.num_kv_heads)] * count,
            neurons=[torch.arange(spec.intermediate_size)] * count,
        )


def smaller_config(
    config: dict[str, Any], spec: ModelSpec, remaining: RemainingUnits
) -> dict[str, Any]:
    """Return config.json with the new sizes, and explicit values for what families derive."""
    smaller = config | {
        "num_hidden_layers": len(remaining.layers),
        "num_attention_heads": len(remaining.heads[0]),
        "num_key_value_heads": len(remaining.kv_heads[0]),
        "head_dim": spec.head_dim,
        "intermediate_size": len(remaining.neurons[0]),
    }
    layers = [spec.layers[i] for i in remaining.layers]
    if any(layer.window for layer in spec.layers) or "layer_types" in config:
        smaller["layer_types"] = [WINDOW if layer.window else FULL for layer in layers]
    if any(layer.rope is None for layer in spec.layers):
        smaller["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    undivided = spec.architecture == LLAMA and spec.hidden_size % len(remaining.heads[0])
    return smaller | AS_MISTRAL if undivided else smaller


def divides(spec: ModelSpec, num_heads: int) -> bool:
    """Whether transformers can read the family with this number of heads."""
    if spec.architecture == LLAMA and not (spec.qkv_bias or spec.mlp_bias):
        return True  # written as Mistral
    return spec.architecture not in HEADS_DIVIDE_HIDDEN or spec.hidden_size % num_heads == 0


def smaller_model(
    model: TrainedModel,
    remaining: RemainingUnits,
    config: dict[str, Any],
    generation: dict[str, Any],
) -> TrainedModel:
    """Return a model of the smaller config with the remaining weights of `model`, ready to run."""
    small = TrainedModel(spec_from_config(config, generation))
    places = dict(small.decoder.named_parameters())
    weights = dict(model.decoder.named_parameters())
    for name, place in places.items():
        source = name
        rows: Tensor | None = None
        columns: Tensor | None = None
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"layers.{remaining.layers[int(index)]}.{rest}"
            rows, columns = cuts(model.spec, remaining, int(index), rest)
        value = weights[source].detach()
        value = value if rows is None else value[rows]
        place.data.copy_(value if columns is None else value[:, columns])
    small.make_ready()
    return small


def cuts(
    spec: ModelSpec, remaining: RemainingUnits, index: int, name: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return (rows, columns) of a layer's weight that remain; None for all of them."""
    layer = remaining.layers[index]
    heads, kv, neurons = remaining.heads[layer], remaining.kv_heads[layer], remaining.neurons[layer]
    q = spread(heads, spec.head_dim)
    each = spread(kv, spec.head_dim)
    qkv = torch.cat([q, spec.q_size + each, spec.q_size + spec.kv_size + each])
    both = torch.cat([neurons, spec.intermediate_size + neurons])
    table: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "attention.qkv.weight": (qkv, None),
        "attention.qkv.bias": (qkv, None),
        "attention.out.weight": (None, q),
        "mlp.gate_up.weight": (both, None),
        "mlp.gate_up.bias": (both, None),
        "mlp.down.weight": (None, neurons),
    }
    return table.get(name, (None, None))


def spread(units: Tensor, size: int) -> Tensor:
    """Return the positions of units of `size`: units 0, 2 of 2 → 0 1 4 5."""
    return (units[:, None] * size + torch.arange(size)).flatten()


def heads_of_kv(spec: ModelSpec, kv_heads: Sequence[int]) -> Tensor:
    """Return the query heads of these KV heads: of KV head 1 with groups of 7, heads 7 … 13."""
    return spread(torch.tensor(kv_heads), spec.num_heads // spec.num_kv_heads)
