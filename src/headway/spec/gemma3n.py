"""Gemma 3n, text: the last layers read the keys and values of earlier ones."""

import math
from dataclasses import replace
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.altup import AltUpSpec
from headway.spec.model import LayerSpec
from headway.spec.values import flag, optional_number, positive, wrong


def one_width(config: dict[str, Any]) -> dict[str, Any]:
    """The config with one `intermediate_size`, which it may give by layer."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list) or not widths:
        return config
    if any(each != widths[0] for each in widths):
        raise UnsupportedModelError(
            "intermediate_size is another one in each layer, which is not supported.",
            "Give a model whose layers are alike.",
        )
    return config | {"intermediate_size": widths[0]}


def scales(config: dict[str, Any]) -> dict[str, float]:
    """Embeddings times √hidden, scores as they are, a soft cap on logits."""
    return {
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "attention_scale": 1.0,
        "logits_softcap": optional_number(config, "final_logit_softcapping", absent=30.0),
    }


def altup(config: dict[str, Any]) -> AltUpSpec:
    """The streams and the rows of each layer."""
    streams = positive(config, "altup_num_inputs", default=4)
    active = config.get("altup_active_idx", 0)
    if isinstance(active, bool) or not isinstance(active, int) or not 0 <= active < streams:
        raise wrong("altup_active_idx", f"an index below {streams}", active)
    return AltUpSpec(
        streams=streams,
        active=active,
        scaled=flag(config, "altup_correct_scale", default=True),
        per_layer_size=positive(config, "hidden_size_per_layer_input", default=256),
        per_layer_vocab=positive(config, "vocab_size_per_layer_input", default=262144),
        laurel_rank=positive(config, "laurel_rank", default=64),
    )


def layers(
    config: dict[str, Any], kinds: list[str], plain: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """The layers, with whose keys and values they read, and how many neurons stay silent.

    Of 35 layers the last 15 read: those with a window those of layer 18, full ones those of 19.
    """
    count = len(plain)
    shared = config.get("num_kv_shared_layers", 15)
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < count:
        raise wrong("num_kv_shared_layers", f"a number of layers below {count}", shared)
    owners = count - shared
    last = {kind: i for i, kind in enumerate(kinds[:owners])}
    if not set(kinds) <= last.keys():
        raise wrong("num_kv_shared_layers", "such that a layer of each kind is left", shared)
    silent = sparsities(config, count)
    return tuple(
        replace(layer, kv_from=last[kinds[i]] if i >= owners else None, sparsity=silent[i])
        for i, layer in enumerate(plain)
    )


def sparsities(config: dict[str, Any], count: int) -> list[float]:
    """The share of each layer's neurons that are silent: 0.95 in the first ten of more layers."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        given = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    right = isinstance(given, list) and len(given) == count
    if not right or not all(type(each) in (int, float) and 0 <= each < 1 for each in given):
        raise wrong("activation_sparsity_pattern", f"{count} numbers of 0 to below 1", given)
    return [float(each) for each in given]
