"""The native kernels of every instruction set that this CPU runs, for tests."""

import pytest
import torch
from torch import Tensor

from headway.runtime.native.available import best_instruction_set
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.load import load

NAMES = []
if best_instruction_set()[0]:
    from headway.runtime.native import _native

    NAMES = _native.instruction_sets()

each_instruction_set = pytest.mark.parametrize(
    "library",
    [pytest.param((name, 3), id=name) for name in NAMES]
    or [pytest.param(None, marks=pytest.mark.skip(best_instruction_set()[1]))],
    indirect=True,
)
"""Parametrizes `library`, a fixture of tests/parity/conftest.py, with three threads."""


def loaded(name: str, threads: int) -> NativeLibrary:
    library, why = load(threads, name)
    assert library is not None, why
    return library


def operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias whose products are of size one."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=draw).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=draw) / inputs**0.5).to(dtype)
    return x, weight, torch.randn(outputs, generator=draw).to(dtype) if bias else None
