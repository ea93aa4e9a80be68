"""Number types and addresses of tensors for the native kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the types in the module."""
E4M3 = 5
"""Type number of weights only."""
INT4, INT8_INT4, INT4_INT8 = 4, 6, 7
"""Type numbers of KV memory with rounded blocks."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The module's functions for one instruction set, with a pool of threads.

    `calls` has one function for each operation, on addresses; see native/module.cpp.
    """

    calls: Any
    instruction_set: str
    lanes: int


def address(tensor: Tensor | None) -> int:
    """Return the address of the tensor's numbers; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
