"""What the user says of layers: which keep a window and the first tokens alone, which are exact.

Given the YAML of `--kv-layers` and a model it promises the model with those layers narrowed, and
nothing else changed. It is lossy: a layer no longer sees what it was trained to see. Layers that
`--kv-cache-dtype-skip-layers` names lose nothing where the others are rounded. Example of a file, a
model of six layers of which layer 1 alone sees everything:

    layers:
      0: {window: 64, sinks: 4}
      2-5: {window: 64, sinks: 4}

A layer that is `whole` there reads everything where others, by `--kv-read`, read their best blocks.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.yaml_file import read_yaml
from headway.spec import LayerSpec, ModelSpec

OPTION = "--kv-layers"
SKIP_OPTION = "--kv-cache-dtype-skip-layers"
HOW = "Write it as layers: {1: whole, 2-5: {window: 64, sinks: 4}}."
WHOLE = "whole"
MOST_SINKS = 1024
"""Attention sinks are the first handful of tokens; more is a mistake."""


def narrowed(spec: ModelSpec, file: str) -> ModelSpec:
    """`spec` with the windows of `file`, as it is without one; UsageError for what does not fit."""
    if not file:
        return spec
    where = f"{OPTION} {file}"
    content = read_yaml(Path(file), OPTION, HOW)
    if not isinstance(content, dict) or content.keys() != {"layers"}:
        raise UsageError(f"{where}: there is no mapping with the one key layers.", HOW)
    if not isinstance(content["layers"], dict) or not content["layers"]:
        raise UsageError(f"{where}: layers is not a mapping of layers to windows.", HOW)
    if any(layer.kv_from is not None for layer in spec.layers):
        raise UsageError(
            f"{where}: layers of {spec.architecture} read the keys and values of others.",
            f"Leave out {OPTION}: both would have to see the same.",
        )
    layers = list(spec.layers)
    given = set[int]()
    for name, row in content["layers"].items():
        for index in indexes(name, len(layers), where):
            if index in given:
                raise UsageError(f"{where}: layer {index} is there twice.", "Name it once.")
            given.add(index)
            layers[index] = narrow(layers[index], row, spec.max_len, f"{where}, layer {index}")
    return replace(spec, layers=tuple(layers))


def narrowing(whole: ModelSpec, spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """By layer the most tokens that it saw before and sees now, 0 for all; () where none changed.

    Layer 1 of a whole model narrowed to a window of 64 and 4 sinks: ((0, 0), (0, 68)).
    """
    if all(a.window == b.window for a, b in zip(whole.layers, spec.layers, strict=True)):
        return ()
    return tuple(
        (old.window, new.window and new.window + new.sinks)
        for old, new in zip(whole.layers, spec.layers, strict=True)
    )


def mean_kept_tokens(num_prompt: int, by_layer: Sequence[tuple[int, int]]) -> int:
    """The prompt's length times the share of its keys and values that is kept to its end.

    Two whole layers, one narrowed to 68 tokens: of 1,000 tokens 534 are kept.
    """
    num_seen, num_kept = (
        sum(min(num_prompt, most or num_prompt) for most in column)
        for column in zip(*by_layer, strict=True)
    )
    return round(num_prompt * num_kept / num_seen) if num_seen else 0


def with_exact_layers(spec: ModelSpec, given: str, kv_dtype: str, dtype: str) -> ModelSpec:
    """`spec` whose layers that `given` names keep keys and values as computed, in `dtype`.

    `given` is --kv-cache-dtype-skip-layers, "0,1,22-23" or ""; the others are of `kv_dtype`.
    """
    if not given:
        return spec
    where = f"{SKIP_OPTION} {given}"
    if kv_dtype == "auto":
        raise UsageError(
            f"{where}: with --kv-cache-dtype auto every layer is as computed.",
            "Add --kv-cache-dtype int8 or int4, or leave it out.",
        )
    layers = list(spec.layers)
    for name in given.split(","):
        for index in indexes(name.strip(), len(layers), where):
            source = layers[index].kv_from
            if source is not None:
                raise UsageError(
                    f"{where}: layer {index} reads the keys and values of layer {source}.",
                    f"Name {source} in its place.",
                )
            layers[index] = replace(layers[index], kv_dtype=dtype)
    if all(layer.kv_dtype for layer in layers if layer.kv_from is None):
        raise UsageError(
            f"{where}: these are all layers.", f"Use --kv-cache-dtype auto without {SKIP_OPTION}."
        )
    return replace(spec, layers=tuple(layers))


def indexes(name: Any, num_layers: int, where: str) -> range:
    """The layers that a key names: 3 is one, "2-5" four."""
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(name), re.ASCII)
    if match is None or isinstance(name, bool):
        raise UsageError(f"{where}: {str(name)[:64]!r} names no layer.", "Write 3, or 2-5.")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < num_layers:
        raise UsageError(
            f"{where}: there is no layer {name}.", f"The model has layers 0 to {num_layers - 1}."
        )
    return range(first, last + 1)


def narrow(layer: LayerSpec, row: Any, max_len: int, where: str) -> LayerSpec:
    """`layer` with the window and the sinks of `row`, or whole; a window is never widened."""
    if row == WHOLE:
        return replace(layer, whole=True)
    if not isinstance(row, dict) or "window" not in row or not row.keys() <= {"window", "sinks"}:
        raise UsageError(f"{where}: give a window, and sinks or none, or {WHOLE}.", HOW)
    window, sinks = row["window"], row.get("sinks", 0)
    most = layer.window or max_len
    if type(window) is not int or not 1 <= window <= most:
        raise UsageError(
            f"{where}: window is {str(window)[:64]!r}; the layer sees {most} tokens.",
            f"Give an integer from 1 to {most}.",
        )
    if type(sinks) is not int or not 0 <= sinks <= MOST_SINKS:
        raise UsageError(
            f"{where}: sinks is {str(sinks)[:64]!r}.", f"Give an integer from 0 to {MOST_SINKS}."
        )
    if layer.window == 0 and window == max_len:
        return layer
    return replace(layer, window=window, sinks=sinks)
