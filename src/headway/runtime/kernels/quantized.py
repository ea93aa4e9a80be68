"""Linear layers on rounded weights in plain torch, the fallback without native kernels.

This is the definition itself, slower than a 16-bit GEMM: it saves memory only.
"""

from torch import Tensor

from headway.runtime.kernels import reference
from headway.runtime.rounding import RoundedWeight, round_weight
from headway.spec.formats import Format


class RoundedLinear:
    """x · weightᵀ + bias on weights of any format."""

    few_rows = 0

    def __init__(self, format: Format) -> None:
        self.format = format

    def prepare(self, weight_OH: Tensor) -> RoundedWeight:
        """Round a weight to int8 or int4."""
        assert self.format.ours, "only a checkpoint has such weights"
        return round_weight(weight_OH, self.format.group, self.format.rotated)

    def pack(self, weight: RoundedWeight) -> RoundedWeight:
        """Return a weight of this format unchanged."""
        assert weight.fits(self.format)
        return weight

    def __call__(self, x_TH: Tensor, weight: RoundedWeight, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        return reference.quantized_linear(x_TH, weight, bias_O)
