"""What Triton's interpreter lacks of a GPU."""

from typing import Any

import numpy as np
import pytest


class OrderedNumpy:
    """numpy whose matrix products add in one order, whatever the number of rows.

    A GPU's `tl.dot` does; BLAS, which the interpreter asks, takes other kernels for few rows.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        """a · b, one input after another."""
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., :, k, None].astype(dtype) * b[..., k, None, :].astype(dtype)
        return total


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter have the same bits for a row in any company."""
    monkeypatch.setattr("triton.runtime.interpreter.np", OrderedNumpy())
