"""One copy per send: small arrays of the host become tensors of the device.

The arrays are packed into one buffer, which is copied at once; the tensors are views of the copy.
Example with two arrays of 3 int64 and 2 float32:

    bytes 0 … 23   the first       bytes 32 … 39   the second, at the next multiple of 16

On CUDA the buffer is pinned and the copy is asynchronous. A buffer is written again only after the
event of its copy. A step sends a few times, and there are buffers for `depth` + 2 steps, so a send
does not wait in practice.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
SENDS_A_STEP = 4


class Staging:
    """Buffers on the host, and their copies to `device`."""

    def __init__(self, device: str, depth: int = 1) -> None:
        self.device = device
        self._pinned = device.startswith("cuda")
        count = SENDS_A_STEP * (depth + 2)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        """Return the arrays on the device, of the same shapes and types. With `into` they are parts
        of it, at offsets that depend on their sizes only."""
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if not end:
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        buffer = self._buffer(end)
        bytes_of = buffer.numpy()
        for array, begin in zip(arrays, places, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            bytes_of[begin : begin + array.nbytes] = flat
        if into is None:
            copy = buffer[:end].to(self.device, non_blocking=True, copy=True)
        else:
            copy = into[:end].copy_(buffer[:end], non_blocking=True)
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
        return [
            copy[begin : begin + array.nbytes]
            .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
            .view(array.shape)
            for array, begin in zip(arrays, places, strict=True)
        ]

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return the next buffer, of at least `num_bytes` bytes, once it may be written."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(
                2 * num_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._buffers[self._turn]
