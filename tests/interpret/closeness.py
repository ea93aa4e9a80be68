"""Numbers for the kernels' cases, and how near their results must be."""

import torch
from torch.testing import assert_close

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    assert found.dtype == expected.dtype
    size = scale * TOLERANCE[found.dtype]
    assert_close(found.float(), expected.float(), atol=size, rtol=size)
