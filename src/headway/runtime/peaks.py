"""The dense products this machine does per second, by type: what the doctor prints of it.

One square product a type, timed as a linear layer does it; a type that torch cannot multiply here
is left out. On one core of a Zen 3: fp32 41, bf16 9 GFLOP/s.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from headway.core.clock import SystemClock

CPU_SIZES, CUDA_SIZES = (256, 1024), (2048, 8192)
"""A small product first: where a type is slow the large one would not end within the budget."""
RUNS = 3

Product = Callable[[Tensor, Tensor], Tensor]
TYPES: dict[str, tuple[torch.dtype, Product]] = {
    "float32": (torch.float32, linear),
    "bfloat16": (torch.bfloat16, linear),
    "float16": (torch.float16, linear),
    "int8": (torch.int8, lambda x, w: torch._int_mm(x, w.t())),
}
"""Type → how torch multiplies it."""


@torch.inference_mode()
def measure_peaks(device: str, budget_s: float) -> dict[str, float]:
    """FLOP/s (int8: operations/s) by type, the best of a few runs within the budget."""
    sizes = CUDA_SIZES if device == "cuda" else CPU_SIZES
    found = {}
    for name, (dtype, product) in TYPES.items():
        try:
            rates = rate_by_size(device, dtype, product, sizes, budget_s / len(TYPES))
        except RuntimeError:  # torch has no such product here
            continue
        found[name] = max(rates)
    return found


def rate_by_size(
    device: str, dtype: torch.dtype, product: Product, sizes: tuple[int, ...], budget_s: float
) -> list[float]:
    """The best rate of each size that fits into the budget; the first always runs."""
    clock = SystemClock()
    started_s = clock.now_s()
    rates: list[float] = []
    for size in sizes:
        expected_s = 2 * size**3 / rates[-1] if rates else 0.0
        if clock.now_s() - started_s + expected_s > budget_s and rates:
            break
        x = torch.ones((size, size), dtype=dtype, device=device)
        best_s = float("inf")
        for _ in range(RUNS):
            before_s = clock.now_s()
            product(x, x)
            if device == "cuda":
                torch.cuda.synchronize()
            best_s = min(best_s, clock.now_s() - before_s)
            if clock.now_s() - started_s > budget_s:
                break
        rates.append(2 * size**3 / best_s)
    return rates
