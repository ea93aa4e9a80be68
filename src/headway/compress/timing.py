"""Time of one row through a matrix in each format, with this machine's kernels."""

import time
from collections.abc import Callable, Mapping
from functools import cache

import torch

from headway.runtime.kernels.table import LinearKernel
from headway.spec.formats import PLAIN, Format

COPIES_BYTES = 96 * 2**20
"""Copies of a matrix are read in turn, so that it comes from memory as in a decode step."""
RUNS_S, MIN_RUNS = 0.05, 5


def seconds_by(
    kernels: Mapping[Format, LinearKernel], dtype: torch.dtype
) -> Callable[[int, int, Format], float]:
    """Return a function (outputs, inputs, format) → seconds of one row; results are cached."""

    @cache
    def measured(outputs: int, inputs: int, format: Format) -> float:
        kernel = kernels[format]
        size = outputs * inputs * (2 if format == PLAIN else 1)
        weight = torch.empty(outputs, inputs).normal_(0, 0.02).to(dtype)
        copies = [
            kernel.prepare(weight.clone()) for _ in range(max(1, min(64, COPIES_BYTES // size)))
        ]
        row = torch.randn(1, inputs).to(dtype)
        best = float("inf")
        end, runs = time.perf_counter() + RUNS_S, 0
        while runs < MIN_RUNS or time.perf_counter() < end:
            began = time.perf_counter()
            for prepared in copies:
                kernel(row, prepared, None)
            best = min(best, (time.perf_counter() - began) / len(copies))
            runs += 1
        return best

    return measured


def no_seconds(outputs: int, inputs: int, format: Format) -> float:
    """Return 0: for a budget that does not depend on time."""
    return 0.0
