"""Linear layers of 4-bit weights and 16-bit activations on a GPU, by a Triton kernel."""

from typing import Any

import torch
from torch import Tensor

from headway.runtime.kernels.grouped import GroupedLinear, Visits
from headway.runtime.rounding import RoundedWeight, round_weight
from headway.spec.formats import GROUPS, Format


class Int4Linear(GroupedLinear):
    """x · weightᵀ + bias; activations are not rounded, unlike on a CPU.

    Products are in `dtype`, also for rows in fp32, which hold such numbers.
    """

    def __init__(self, format: Format, dtype: torch.dtype) -> None:
        from headway.runtime.cuda.triton import linear_int4

        assert self.supports(format)
        self.format, self._dtype = format, dtype
        self._kernel = linear_int4

    @property
    def groups(self) -> bool:
        """Whether all experts have the same order of inputs."""
        return not self.format.permuted

    @staticmethod
    def supports(format: Format) -> bool:
        """Return whether it multiplies weights of this format."""
        return format.kind == "int4" and format.group in GROUPS

    def prepare(self, weight_OH: Tensor) -> Any:
        """Round and pack a weight."""
        return self._kernel.pack(round_weight(weight_OH, self.format.group))

    def pack(self, weight: RoundedWeight) -> Any:
        """Pack a rounded weight."""
        assert weight.fits(self.format)
        return self._kernel.pack(weight)

    def __call__(self, x_TH: Tensor, weight: Any, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        return self._kernel.linear_int4(x_TH, weight, bias_O, dtype=self._dtype)

    def stack(self, prepared: list[Any]) -> Any:
        return self._kernel.stack(prepared)

    def grouped(self, x_VH: Tensor, weight: Any, bias_EO: Tensor | None, visits: Visits) -> Tensor:
        return self._kernel.linear_int4(x_VH, weight, bias_EO, visits, self._dtype)
