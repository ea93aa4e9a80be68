"""The smaller model: its config.json, and the weights that stay, in their new places."""

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
DIVIDED = (LLAMA, "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Whose hidden size transformers wants to be a multiple of the number of heads."""
AS_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
"""The same model under a name for which any number of heads will do."""


@dataclass(slots=True)
class Kept:
    """What stays of each layer that stays: query heads, KV heads, neurons, by number."""

    layers: list[int]
    heads: list[Tensor] = field(default_factory=list)
    kv_heads: list[Tensor] = field(default_factory=list)
    neurons: list[Tensor] = field(default_factory=list)

    @staticmethod
    def all_of(spec: ModelSpec) -> "Kept":
        """Everything."""
        count = spec.num_layers
        return Kept(
            layers=list(range(count)),
            heads=[torch.arange(spec.num_heads)] * count,
            kv_heads=[torch.arange(spec.num_kv_heads)] * count,
            neurons=[torch.arange(spec.intermediate_size)] * count,
        )


def smaller_config(config: dict[str, Any], spec: ModelSpec, kept: Kept) -> dict[str, Any]:
    """config.json with the new sizes; what families derive from sizes or places is written out.

    `head_dim`, since hidden / heads is another number now; `layer_types` and `no_rope_layers`,
    since a rule such as every sixth layer would count anew.
    """
    found = config | {
        "num_hidden_layers": len(kept.layers),
        "num_attention_heads": len(kept.heads[0]),
        "num_key_value_heads": len(kept.kv_heads[0]),
        "head_dim": spec.head_dim,
        "intermediate_size": len(kept.neurons[0]),
    }
    layers = [spec.layers[i] for i in kept.layers]
    if any(layer.window for layer in spec.layers) or "layer_types" in config:
        found["layer_types"] = [WINDOW if layer.window else FULL for layer in layers]
    if any(layer.rope is None for layer in spec.layers):
        found["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    undivided = spec.architecture == LLAMA and spec.hidden_size % len(kept.heads[0])
    return found | AS_MISTRAL if undivided else found


def divides(spec: ModelSpec, num_heads: int) -> bool:
    """Whether transformers reads a folder of the family with so many heads."""
    if spec.architecture == LLAMA and not (spec.qkv_bias or spec.mlp_bias):
        return True  # written as Mistral
    return spec.architecture not in DIVIDED or spec.hidden_size % num_heads == 0


def smaller_model(
    model: TrainedModel, kept: Kept, config: dict[str, Any], generation: dict[str, Any]
) -> TrainedModel:
    """A model of the smaller config with what is kept of `model`, ready to run."""
    small = TrainedModel(spec_from_config(config, generation))
    places = dict(small.decoder.named_parameters())
    weights = dict(model.decoder.named_parameters())
    for name, place in places.items():
        source = name
        rows: Tensor | None = None
        columns: Tensor | None = None
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"layers.{kept.layers[int(index)]}.{rest}"
            rows, columns = cuts(model.spec, kept, int(index), rest)
        value = weights[source].detach()
        value = value if rows is None else value[rows]
        place.data.copy_(value if columns is None else value[:, columns])
    small.make_ready()
    return small


def cuts(spec: ModelSpec, kept: Kept, index: int, name: str) -> tuple[Tensor | None, Tensor | None]:
    """(rows, columns) of a layer's weight that stay; None: all.

    2 of 3 query heads of 64 over one KV head: rows 0 … 127 (q), 192 … 255 (k), 256 … 319 (v).
    """
    layer = kept.layers[index]
    heads, kv, neurons = kept.heads[layer], kept.kv_heads[layer], kept.neurons[layer]
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
    """The places of units of `size`: units 0, 2 of 2 → 0 1 4 5."""
    return (units[:, None] * size + torch.arange(size)).flatten()


def kept_heads(spec: ModelSpec, kept_kv: Sequence[int]) -> Tensor:
    """The query heads of these KV heads: of KV head 1 of groups of 7 heads 7 … 13."""
    return spread(torch.tensor(kept_kv), spec.num_heads // spec.num_kv_heads)
