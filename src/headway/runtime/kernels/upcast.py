"""Linear layers in bf16 or fp16 on a CPU that cannot multiply them: convert to fp32, then multiply.

torch computes such GEMMs row by row there (about 20 GFLOP/s on two AVX2 cores, whatever the
number of rows). Converting a panel of weights that stays in the cache and multiplying it by an fp32
GEMM is 2 to 8 times faster from 8 rows on; one or two rows stay with torch, which streams the
weights at the speed of the memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.runtime.kernels import reference

FEW_ROWS = 2
"""Up to this count of rows torch's row-by-row GEMM is faster: it reads half the bytes."""


class UpcastLinear:
    """x · weightᵀ + bias over `gemm`, the fp32 one, with a scratch panel of 4 MiB."""

    def __init__(self, gemm: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        self._gemm = gemm
        self._scratch = torch.empty(reference.PANEL_NUMBERS, dtype=torch.float32)

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        few = x_TH.shape[0] <= FEW_ROWS and x_TH.dtype == weight_OH.dtype
        if few or weight_OH.dtype == torch.float32:
            return reference.linear(x_TH, weight_OH, bias_O)
        num_outputs, hidden = weight_OH.shape
        panel = max(1, reference.PANEL_NUMBERS // hidden)
        x = x_TH.float()
        out_TO = torch.empty(x.shape[0], num_outputs, dtype=x_TH.dtype)
        if self._scratch.numel() < panel * hidden:
            self._scratch = torch.empty(panel * hidden, dtype=torch.float32)
        for begin in range(0, num_outputs, panel):
            weight = weight_OH[begin : begin + panel]
            wide = self._scratch[: weight.numel()].view(weight.shape)
            wide.copy_(weight)
            bias = None if bias_O is None else bias_O[begin : begin + panel].float()
            out_TO[:, begin : begin + panel] = self._gemm(x, wide, bias)
        return out_TO
