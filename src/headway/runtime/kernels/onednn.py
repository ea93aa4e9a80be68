"""fp32 linear layers of few rows through oneDNN, which torch ships but does not choose for them.

torch hands fp32 products to MKL. On two Zen 3 cores MKL takes 25 ms for 8 rows of a 32,000 × 896
head and oneDNN 10 ms, on the same weights as they lie in memory; from some hundred rows on they
are alike.
"""

import torch
from torch import Tensor
from torch.nn import functional

MANY_ROWS = 256


def available() -> bool:
    """Whether this build of torch has oneDNN's linear operation."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, (T, O), all fp32."""
    if x_TH.shape[0] > MANY_ROWS:
        return functional.linear(x_TH, weight_OH, bias_O)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TH, weight_OH, bias_O, "none", [], "")
    return product
