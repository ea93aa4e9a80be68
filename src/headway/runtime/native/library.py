"""What the native kernels need to know of torch: number types and addresses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number types as the module numbers them."""
E4M3 = 5
"""That of weights alone."""
INT4, INT8_INT4, INT4_INT8 = 4, 6, 7
"""That of KV memory whose blocks are rounded."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The module's functions for one instruction set, with a pool of threads.

    `calls` has one function for each operation, on addresses; see native/module.cpp.
    """

    calls: Any
    instruction_set: str
    lanes: int


def address(tensor: Tensor | None) -> int:
    """Where the tensor's numbers begin; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
