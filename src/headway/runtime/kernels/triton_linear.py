"""Linear layers on a GPU by a Triton kernel: 16-bit activations, one tile shape for all row counts.

`TritonLinear` multiplies weights of 16 bits, `WideningLinear` numbers in FP8 or int8 that are
widened on the way, with a scale for each output or group of inputs; activations are never rounded.
Products are taken in the model's type, also of rows in fp32, which are such numbers widened.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.runtime.kernels.grouped import GroupedLinear, Visits
from headway.runtime.rounding import RoundedWeight, round_weight, round_weight_fp8
from headway.spec.formats import Format

MIN_GROUP = 16
"""Minimum of inputs of one product."""


class TritonLinear(GroupedLinear):
    """x · weightᵀ + bias on plain weights; `gemm` replaces the kernel for all but experts."""

    def __init__(self, gemm: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None):
        from headway.runtime.cuda.triton import linear

        self._kernel, self._gemm = linear, gemm or linear.linear

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        return self._gemm(x_TH, weight_OH, bias_O)

    def stack(self, prepared: list[Tensor]) -> Tensor:
        raise AssertionError("the plain matrices are stacked already")

    def grouped(
        self, x_VH: Tensor, weight: Tensor, bias_EO: Tensor | None, visits: Visits
    ) -> Tensor:
        return self._kernel.linear(x_VH, weight, bias_EO, visits)


class WideningLinear(GroupedLinear):
    """x · weightᵀ + bias on rounded weights of 8 bits; products are in `dtype`."""

    def __init__(self, format: Format, dtype: torch.dtype) -> None:
        from headway.runtime.cuda.triton import linear

        assert self.supports(format)
        self.format, self._dtype = format, dtype
        self._kernel = linear

    @staticmethod
    def supports(format: Format) -> bool:
        """Return whether it multiplies weights of this format."""
        plain = format.offsets == "none" and not (format.permuted or format.rotated)
        return format.kind in ("fp8", "int8") and plain and format.group % MIN_GROUP == 0

    def prepare(self, weight_OH: Tensor) -> Any:
        """Round a weight by output and pack it."""
        assert not self.format.group, "only a checkpoint has such weights"
        round_plain = round_weight_fp8 if self.format.kind == "fp8" else round_by_output
        return self._kernel.pack(round_plain(weight_OH))

    def pack(self, weight: RoundedWeight) -> Any:
        """Pack a rounded weight."""
        assert weight.fits(self.format)
        return self._kernel.pack(weight)

    def __call__(self, x_TH: Tensor, weight: Any, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        return self._kernel.linear(x_TH, weight, bias_O, dtype=self._dtype)

    def stack(self, prepared: list[Any]) -> Any:
        return self._kernel.stack(prepared)

    def grouped(self, x_VH: Tensor, weight: Any, bias_EO: Tensor | None, visits: Visits) -> Tensor:
        return self._kernel.linear(x_VH, weight, bias_EO, visits, self._dtype)


def round_by_output(weight_OH: Tensor) -> RoundedWeight:
    """Round a weight to int8 with a scale for each output."""
    return round_weight(weight_OH, 0)
