"""Linear layers on int8 and int4 weights in plain torch: what runs where the native ones do not.

It is the definition itself, slower than a 16-bit GEMM: it saves memory alone.
"""

from torch import Tensor

from headway.runtime.kernels import reference
from headway.runtime.rounding import RoundedWeight, round_weight


class RoundedLinear:
    """x · weightᵀ + bias on rounded weights; `group` 0 is int8, else int4 in such groups."""

    few_rows = 0

    def __init__(self, group: int) -> None:
        self.group = group

    def prepare(self, weight_OH: Tensor) -> RoundedWeight:
        """The weight, rounded."""
        return round_weight(weight_OH, self.group)

    def __call__(self, x_TH: Tensor, weight: RoundedWeight, bias_O: Tensor | None) -> Tensor:
        """(T, O) in the type of x."""
        return reference.quantized_linear(x_TH, weight, bias_O)
