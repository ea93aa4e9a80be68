"""Output of a trained student: config, weights, text files.

A student that was trained with rounding is written with the levels and scales of its last step, by
the writer of `headway quantize`; any other in its own type.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headway.compress.folder import copy_text_files, write_model
from headway.compress.rows import HEAD_NAME
from headway.compress.train.model import TrainedModel
from headway.compress.train.student import rounded_layers
from headway.compress.write import FolderContent, write_config, write_weights
from headway.runtime.checkpoint import targets
from headway.runtime.rounding import RoundedWeight
from headway.spec import read_json
from headway.spec.formats import INT8, PLAIN, Format


def write_student(student: TrainedModel, folder: Path, out: Path) -> None:
    """Fill `out`; `folder` is the student's original folder."""
    copy_text_files(folder, out)
    if rounded_layers(student):
        content = rounded_content(student)
        write_weights(content, out)
        write_config(folder, content, out)
        return
    config = read_json(folder / "config.json")
    config.pop("quantization_config", None)  # a fresh student of a quantized folder's sizes
    write_model(out, config, student.tensors(), student.spec.dtype)


def rounded_content(student: TrainedModel) -> FolderContent:
    """Return the writer's input: parts of fused matrices by their names in the checkpoint."""
    rounded = rounded_layers(student)
    tensors, dtype = student.tensors(), getattr(torch, student.spec.dtype)
    parts: dict[str, tuple[str, slice]] = {HEAD_NAME: ("head", slice(None))}
    for name, target in targets(student.decoder, student.spec).items():
        if target.module in rounded and name.endswith(".weight"):
            first = target.place.storage_offset() // target.place.shape[1]
            rows = slice(first, first + len(target.place))
            parts[name.removesuffix(".weight")] = (target.module, rows)

    def rounded_part(module: str) -> RoundedWeight:
        whole, rows = parts[module]
        weight = rounded[whole]
        return RoundedWeight(weight.levels_OH[rows], weight.scales_OG[rows], weight.group)

    plain: Callable[[str], Tensor] = lambda name: tensors[name].to(dtype)  # noqa: E731
    formats = {name: format_of(rounded.get(module)) for name, (module, _) in parts.items()}
    return FolderContent(
        formats=formats,
        rounded=rounded_part,
        plain=plain,
        names=list(tensors),
        dtype=student.spec.dtype,
        w8a8=set(formats.values()) == {INT8},
    )


def format_of(weight: RoundedWeight | None) -> Format:
    """Return int4 by the weight's group, or int8 without a group."""
    if weight is None:
        return PLAIN
    return Format("int4", weight.group) if weight.group else INT8
