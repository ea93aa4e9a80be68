"""The native kernels of every instruction set that this CPU runs, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def only(name: str) -> Iterator[None]:
    """Engines that are made meanwhile have the kernels of this instruction set alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "instruction_sets", lambda: [name])
        yield


def cut_in_blocks(atols: tuple[float, float]) -> pytest.MarkDecorator:
    """Parametrizes `sizes`, `spans` of rows, those `checked` and `atol`: many rows and a few.

    There are more rows and inputs than are multiplied at once, and more panels than sums are kept.
    """
    many = (600, 2181, 1700), [(7, 19), (500, 513), (511, 551), (30, 542), (0, 599)], (490, 530)
    few = (32, 36_001, 100), [(7, 11), (12, 32), (20, 32)], (0, 32)
    return pytest.mark.parametrize(
        ("sizes", "spans", "checked", "atol"),
        [(*many, atols[0]), (*few, atols[1])],
        ids=["many rows", "a few rows"],
    )


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
