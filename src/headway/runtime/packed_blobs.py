"""Convert packed matrices to bytes and back, for the cache on disk and for shared memory.

The layer `layers.0.mlp.down` has the blob `layers.0.mlp.down.0`, and one more for each further
matrix: of its experts, or of parts with formats of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.runtime.kernels.parts import Parts, PartsLinear


def kernels_of(kernel: Any, outputs: int) -> list[tuple[Any, int]]:
    """Return (kernel, outputs) of each matrix of a layer."""
    if isinstance(kernel, PartsLinear):
        return list(zip(kernel.kernels, kernel.outputs, strict=True))
    return [(kernel, outputs)]


def blob_sizes(kernel: Any, shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bytes of each matrix of a layer with these (outputs, inputs)."""
    return [
        one.blob_bytes(rows, inputs)
        for outputs, inputs in shapes
        for one, rows in kernels_of(kernel, outputs)
    ]


def from_blobs(
    kernel: Any, shapes: Sequence[tuple[int, int]], blobs: Sequence[memoryview]
) -> list[Any]:
    """Return the prepared matrices for `restore` of the layer, from blobs of `blob_sizes` bytes."""
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
    """Return the memory of a contiguous tensor."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data
