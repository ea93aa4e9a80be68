"""Windows by layer that the user gives: which layers keep a window and the first tokens alone.

Given the YAML of `--kv-layers` and a model it promises the model with those layers narrowed, and
nothing else changed. It is lossy: a layer no longer sees what it was trained to see. Example, a
model of six layers of which layer 1 alone sees everything:

    layers:
      0: {window: 64, sinks: 4}
      2-5: {window: 64, sinks: 4}
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.model_spec import LayerSpec, ModelSpec
from headway.core.yaml_file import read_yaml

OPTION = "--kv-layers"
HOW = "Write it as layers: {2-5: {window: 64, sinks: 4}}."
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
    layers = list(spec.layers)
    given = set[int]()
    for name, row in content["layers"].items():
        for index in indexes(name, len(layers), where):
            if index in given:
                raise UsageError(f"{where}: layer {index} is there twice.", "Name it once.")
            given.add(index)
            layers[index] = narrow(layers[index], row, spec.max_len, f"{where}, layer {index}")
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
    """`layer` with the window and the sinks of `row`; a window is never widened."""
    if not isinstance(row, dict) or "window" not in row or not row.keys() <= {"window", "sinks"}:
        raise UsageError(f"{where}: give a window, and sinks or none.", HOW)
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
