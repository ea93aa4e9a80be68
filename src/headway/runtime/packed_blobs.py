"""Packed matrices as bytes, and back: what a cache on disk and memory that is shared hold.

A layer's `layers.0.mlp.down` are the blobs `layers.0.mlp.down.0`, and further numbers where it has
several matrices: of experts, of parts with formats of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.runtime.kernels.parts import Parts, PartsLinear


def kernels_of(kernel: Any, outputs: int) -> list[tuple[Any, int]]:
    """(kernel, outputs) of each matrix of a layer."""
    if isinstance(kernel, PartsLinear):
        return list(zip(kernel.kernels, kernel.outputs, strict=True))
    return [(kernel, outputs)]


def blob_sizes(kernel: Any, shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of each matrix of a layer whose matrices have these (outputs, inputs)."""
    return [
        one.blob_bytes(rows, inputs)
        for outputs, inputs in shapes
        for one, rows in kernels_of(kernel, outputs)
    ]


def from_blobs(
    kernel: Any, shapes: Sequence[tuple[int, int]], blobs: Sequence[memoryview]
) -> list[Any]:
    """What `restore` of the layer takes, of blobs that have the `blob_sizes`."""
    remaining = iter(blobs)
    prepared: list[Any] = []
    for outputs, inputs in shapes:
        matrices = [
            one.from_blob(torch.frombuffer(next(remaining), dtype=torch.uint8), rows, inputs)
            for one, rows in kernels_of(kernel, outputs)
        ]
        has_parts = isinstance(kernel, PartsLinear)
        prepared.append(Parts(matrices, kernel.kernels) if has_parts else matrices[0])
    return prepared


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data
