"""Torch's types as Triton names them, and the type of products."""

import os

import torch
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type that a product of such numbers is made in."""
    return tl.float32 if INTERPRETED else TYPES[dtype]


def power_of_two(count: int) -> int:
    """The least power of 2 that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()
