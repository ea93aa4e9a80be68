"""Weights of GGUF files, straight from their bytes: quantized ones get no 16-bit copy.

Matrices become levels and scales; all else keeps its type. The embedding is looked up, not
multiplied: where it is quantized it is yielded twice, dequantized for the lookup, and quantized for
the head if the two are tied.
"""

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.core.regular_file import open_regular
from headway.runtime.quantized.folder import ModulePlace, linear_places, module_formats
from headway.runtime.quantized.gguf_blocks import PACKINGS, unpack
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec
from headway.spec.formats import PLAIN, Format
from headway.spec.gguf.config import config_of
from headway.spec.gguf.header import Header, read_header, shown
from headway.spec.gguf.names import Weight, order_of_rows, weights_of
from headway.spec.gguf.types import PLAIN as PLAIN_TYPES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Source = Iterator[tuple[str, Callable[[], Tensor | RoundedWeight]]]


def open_gguf(path: Path, spec: ModelSpec) -> Source:
    """Yield (name in a Hugging Face folder, function that reads it) of every weight of a file.

    They and the functions raise CheckpointError, or UnsupportedModelError for an unknown format.
    """
    header = read_header(path)
    weights = weights_of(header, config_of(header))
    for weight in weights:
        refuse_format(header, weight)
    memories = {file: map_file(file) for file in {weight.info.path for weight in weights}}
    dtype = getattr(torch, spec.dtype)
    for weight in weights:
        memory = memories[weight.info.path]
        if weight.name == EMBEDDING and weight.info.type.name not in PLAIN_TYPES:
            yield weight.name, partial(read_plain, memory, weight, dtype)
            if spec.tied:
                yield HEAD, partial(read_weight, memory, weight)
        else:
            yield weight.name, partial(read_weight, memory, weight)


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately: torch needs memory that it could write to."""
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def refuse_format(header: Header, weight: Weight) -> None:
    """Raise UnsupportedModelError for a format that is not read, or a quantized vector."""
    name = weight.info.type.name
    if name in PLAIN_TYPES or (name in PACKINGS and weight.columns > 1):
        return
    raise UnsupportedModelError(
        f"{header.path.name}: {shown(weight.tensor)} is {name}, which is not read.",
        f"Take a file of the same model in one of: {', '.join([*PACKINGS, *PLAIN_TYPES])}.",
    )


def raw_rows(memory: mmap.mmap, weight: Weight) -> Tensor:
    """Return the bytes of a weight by rows, in the order of a folder, (rows, bytes of a row)."""
    size = weight.info.type.bytes_of(weight.columns)
    begin = weight.info.begin + weight.first * size
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=weight.rows * size, offset=begin)
    raw_RB = raw.view(weight.rows, size)
    return raw_RB[order_of_rows(weight.rows, weight.heads)] if weight.heads else raw_RB


def read_weight(memory: mmap.mmap, weight: Weight) -> Tensor | RoundedWeight:
    """Return a weight as stored: numbers, or levels and scales."""
    raw_RB, name = raw_rows(memory, weight), weight.info.type.name
    if name in PLAIN_TYPES:
        tensor = raw_RB.view(getattr(torch, PLAIN_TYPES[name]))
        tensor = tensor.squeeze(-1) if len(weight.info.shape) == 1 else tensor
        return tensor.float() - weight.shift if weight.shift else tensor
    return unpack_rows(raw_RB, weight)


def unpack_rows(raw_RB: Tensor, weight: Weight) -> RoundedWeight:
    """Return rows of blocks as levels and scales. Raises CheckpointError for NaN scales."""
    rounded = unpack(raw_RB, weight.info.type)
    for part in (rounded.scales_OG, rounded.offsets_OG):
        if part is not None and not part.isfinite().all():
            raise CheckpointError(
                f"{shown(weight.tensor)} has a scale that is not a finite number.",
                "Copy the file again: it is damaged.",
            )
    return rounded


def read_plain(memory: mmap.mmap, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return a quantized matrix as numbers of `dtype`, computed 16 MiB of fp32 at a time."""
    raw_RB = raw_rows(memory, weight)
    plain = torch.empty(weight.rows, weight.columns, dtype=dtype)
    rows = max(1, (1 << 22) // weight.columns)
    for target, some in zip(plain.split(rows), raw_RB.split(rows), strict=True):
        target.copy_(unpack_rows(some, weight).plain())
    return plain


def gguf_formats(path: Path, spec: ModelSpec) -> tuple[tuple[str, Format], ...]:
    """Return (module or a part of it, format) of the quantized weights; reads the header only.

    Raises the errors of `open_gguf`.
    """
    header = read_header(path)
    types: dict[str, str] = {}
    for weight in weights_of(header, config_of(header)):
        refuse_format(header, weight)
        types[weight.name] = weight.info.type.name
    if spec.tied:
        types[HEAD] = types.get(EMBEDDING, "")
    by_place: dict[ModulePlace, list[Format]] = defaultdict(list)
    for name, place in linear_places(spec).items():
        packing = PACKINGS.get(types.get(f"{name}.weight", ""))
        by_place[place].append(PLAIN if packing is None else packing.format)
    return tuple(module_formats(by_place))
