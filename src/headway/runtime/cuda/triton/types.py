"""Torch's types in Triton's names, and the type of products."""

import os

import torch
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which a product of such numbers is computed."""
    return tl.float32 if INTERPRETED else TYPES[dtype]


def power_of_two(count: int) -> int:
    """Return the least power of 2 that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()
