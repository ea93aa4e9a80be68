"""W8A8 by torch's int8 product: the numbers of `reference.quantized_linear` for int8 by output.

CUDA wants more than 16 rows, and sizes that are multiples of 8: inputs and outputs are filled up
with zeros when the weight is packed, rows in each call. T tokens, H inputs, O outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.core.formats import INT8, Format
from headway.runtime.kernels.own_cuda import WideLinear
from headway.runtime.kernels.reference import with_bias
from headway.runtime.rounding import RoundedWeight, round_rows, round_weight

LEAST_ROWS, MULTIPLE = 32, 8


@dataclass(frozen=True, slots=True)
class FilledInt8:
    """Levels (O, H) and scales (O), filled up; `outputs` are the true ones."""

    levels_OH: Tensor
    scales_O: Tensor
    outputs: int

    @property
    def nbytes(self) -> int:
        return int(self.levels_OH.nbytes + self.scales_O.nbytes)


class Int8Linear:
    """x · weightᵀ + bias on int8 by output, activations rounded by token."""

    few_rows = 0

    def __init__(self, format: Format, dtype: torch.dtype) -> None:
        assert self.knows(format)
        self.format, self._dtype = format, dtype

    @staticmethod
    def knows(format: Format) -> bool:
        """Whether it multiplies weights of this format."""
        return format == INT8

    def for_experts(self) -> WideLinear:
        """The kernel of experts' matrices: their activations are not rounded."""
        return WideLinear(self.format, self._dtype)

    def prepare(self, weight_OH: Tensor) -> FilledInt8:
        """The weight, rounded."""
        return self.pack(round_weight(weight_OH, 0))

    def pack(self, weight: RoundedWeight) -> FilledInt8:
        """A weight that is rounded already."""
        assert weight.fits(INT8)
        outputs, inputs = weight.levels_OH.shape
        levels = functional.pad(
            weight.levels_OH, (0, -inputs % MULTIPLE, 0, -outputs % MULTIPLE)
        ).contiguous()
        scales_O = functional.pad(weight.scales_OG[:, 0], (0, -outputs % MULTIPLE))
        return FilledInt8(levels, scales_O, outputs)

    def __call__(self, x_TH: Tensor, weight: FilledInt8, bias_O: Tensor | None) -> Tensor:
        """(T, O) in the type of x."""
        tokens, inputs = x_TH.shape
        rows_TH, scales_T = round_rows(x_TH)
        more = max(LEAST_ROWS - tokens, -tokens % MULTIPLE)
        rows_TH = functional.pad(rows_TH, (0, weight.levels_OH.shape[1] - inputs, 0, more))
        sums_TO = torch._int_mm(rows_TH, weight.levels_OH.T)[:tokens].float()
        out_TO = sums_TO * (scales_T[:, None] * weight.scales_O)
        return with_bias(out_TO[:, : weight.outputs], bias_O).to(x_TH.dtype)
