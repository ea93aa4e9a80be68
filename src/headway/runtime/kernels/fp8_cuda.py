"""W8A8 in FP8 by torch's scaled product: the numbers of `reference.scaled_fp8_linear`.

CUDA needs sizes that are multiples of 16: inputs and outputs are padded with zeros when the weight
is packed. Sums are fp32 (no fast accumulation). T tokens, H inputs, O outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.kernels.reference import with_bias
from headway.runtime.kernels.triton_linear import WideningLinear
from headway.runtime.rounding import RoundedWeight, round_rows_fp8, round_weight_fp8
from headway.spec.formats import Format

MULTIPLE = 16
OUT_TYPES = (torch.bfloat16, torch.float32)
"""Types of the product; fp16 is converted from bf16."""


@dataclass(frozen=True, slots=True)
class FilledFp8:
    """Numbers (O, H) of type e4m3 and scales (1, O), padded; `outputs` has no padding."""

    levels_OH: Tensor
    scales_1O: Tensor
    outputs: int

    @property
    def nbytes(self) -> int:
        return int(self.levels_OH.nbytes + self.scales_1O.nbytes)


class Fp8Linear:
    """x · weightᵀ + bias on e4m3 with a scale by output, activations rounded to it by token."""

    few_rows = 0

    def __init__(self, format: Format, dtype: torch.dtype) -> None:
        assert self.supports(format)
        self.format, self._dtype = format, dtype

    @staticmethod
    def supports(format: Format) -> bool:
        """Return whether it multiplies weights of this format."""
        return format == Format("fp8")

    def prepare(self, weight_OH: Tensor) -> FilledFp8:
        """Round and pack a weight."""
        return self.pack(round_weight_fp8(weight_OH))

    def for_experts(self) -> WideningLinear:
        """Return the kernel of experts, which does not round activations."""
        return WideningLinear(self.format, self._dtype)

    def pack(self, weight: RoundedWeight) -> FilledFp8:
        """Pack a rounded weight."""
        assert weight.fits(self.format)
        outputs, inputs = weight.levels_OH.shape
        fill = (0, -inputs % MULTIPLE, 0, -outputs % MULTIPLE)
        bits = functional.pad(weight.levels_OH.view(torch.uint8), fill).contiguous()
        scales_1O = functional.pad(weight.scales_OG[:, 0], (0, -outputs % MULTIPLE))[None]
        return FilledFp8(bits.view(torch.float8_e4m3fn), scales_1O.contiguous(), outputs)

    def __call__(self, x_TH: Tensor, weight: FilledFp8, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        rows_TH, scales_T = round_rows_fp8(x_TH)
        fill = (0, weight.levels_OH.shape[1] - x_TH.shape[1])
        rows_TH = functional.pad(rows_TH.view(torch.uint8), fill).view(torch.float8_e4m3fn)
        out_TO = torch._scaled_mm(
            rows_TH,
            weight.levels_OH.T,
            scales_T[:, None],
            weight.scales_1O,
            out_dtype=x_TH.dtype if x_TH.dtype in OUT_TYPES else torch.bfloat16,
        )
        out_TO = out_TO[:, : weight.outputs]
        if bias_O is None:
            return out_TO.to(x_TH.dtype)
        return with_bias(out_TO.float(), bias_O).to(x_TH.dtype)
