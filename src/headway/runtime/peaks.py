"""Measure the dense FLOP/s of this machine by type, for the doctor.

One square GEMM of each type is timed, by the native kernels where they run, else by torch; a type
that cannot be multiplied here has no figure. On one core of a Zen 3 in torch:
fp32 41, bf16 9 GFLOP/s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from headway.core.clock import SystemClock
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.spec.formats import ROTATED_INT8

CPU_SIZES, CUDA_SIZES = (256, 1024), (2048, 8192)
"""The small GEMM runs first: for a slow type the large one would exceed the budget."""
RUNS = 3
"""Timed runs of each GEMM; the best counts, since other processes may slow one or two."""
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Gemm = Callable[[], object]
Gemms = dict[str, Callable[[int], Gemm]]
"""Type → function of a size that returns a GEMM of two square matrices."""


def torch_gemms(device: str) -> Gemms:
    """Return the GEMMs of torch by type."""

    def floats(dtype: torch.dtype) -> Callable[[int], Gemm]:
        def make(size: int) -> Gemm:
            x = torch.ones((size, size), dtype=dtype, device=device)
            return lambda: linear(x, x)

        return make

    def int8(size: int) -> Gemm:
        x = torch.ones((size, size), dtype=torch.int8, device=device)
        return lambda: torch._int_mm(x, x.t())

    return {name: floats(dtype) for name, dtype in FLOATS.items()} | {"int8": int8}


def native_gemms(library: NativeLibrary) -> Gemms:
    """Return the GEMMs of the native kernels by type; int8 includes rounding the activations."""

    def weights(kernel: Any, dtype: torch.dtype) -> Callable[[int], Gemm]:
        def make(size: int) -> Gemm:
            x = torch.ones((size, size), dtype=dtype)
            packed = kernel.prepare(x)
            return lambda: kernel(x, packed, None)

        return make

    plain, rounded = NativeLinear(library), NativeQuantizedLinear(library, ROTATED_INT8)
    gemms = {name: weights(plain, dtype) for name, dtype in FLOATS.items()}
    return gemms | {"int8": weights(rounded, torch.float32)}


@torch.inference_mode()
def measure_peaks(
    device: str, budget_s: float, library: NativeLibrary | None = None
) -> dict[str, float]:
    """Return FLOP/s (int8: operations/s) by type, the best of a few runs within the budget."""
    sizes = CUDA_SIZES if device == "cuda" else CPU_SIZES
    gemms = torch_gemms(device) if library is None else native_gemms(library)
    peaks = {}
    for name, make in gemms.items():
        try:
            rates = rate_by_size(device, make, sizes, budget_s / len(gemms))
        except RuntimeError:  # torch has no such GEMM here
            continue
        peaks[name] = max(rates)
    return peaks


def rate_by_size(
    device: str, make: Callable[[int], Gemm], sizes: tuple[int, ...], budget_s: float
) -> list[float]:
    """Return the best rate of each size within the budget; the first always runs."""
    clock = SystemClock()
    started_s = clock.now_s()
    rates: list[float] = []
    for size in sizes:
        expected_s = 2 * size**3 / rates[-1] if rates else 0.0
        if clock.now_s() - started_s + expected_s > budget_s and rates:
            break
        gemm = make(size)
        best_s = float("inf")
        for _ in range(RUNS):
            before_s = clock.now_s()
            gemm()
            if device == "cuda":
                torch.cuda.synchronize()
            best_s = min(best_s, clock.now_s() - before_s)
            if clock.now_s() - started_s > budget_s:
                break
        rates.append(2 * size**3 / best_s)
    return rates
