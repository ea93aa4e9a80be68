"""Linear layers by the fp32 GEMM of oneDNN, which torch contains but does not select for them.

torch hands fp32 GEMMs to MKL. On two Zen 3 cores MKL takes 25 ms for 8 rows of a 32,000 × 896
head, oneDNN 10 ms on the same weights as they lie in memory and 6 ms on weights packed for it
once. Packed weights are fp32 whatever the checkpoint's type: on a CPU that does not multiply bf16
that doubles their memory, and is still the fastest GEMM in torch there.
"""

import torch
from torch import Tensor
from torch.nn import functional

MANY_ROWS = 256
"""Beyond it MKL is as fast on a plain weight (lab log, torch's GEMMs on a CPU without bf16)."""
PACKED_FOR_ROWS = ROWS_STEP = 16
"""Rows that a weight is packed for, and the multiple that larger counts are rounded up to."""


def available() -> bool:
    """Return whether this build of torch has the linear operations of oneDNN."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def gemm(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, (T, O), all fp32; the weight is plain or packed.

    oneDNN caches 0.2 to 0.7 MB for every number of rows, so row counts are rounded up: 17 rows are
    computed as 32. Five small layers with 1 to 400 rows then take 120 MB in place of 700.
    """
    rows = x_TH.shape[0]
    extra = -rows % ROWS_STEP if rows > ROWS_STEP else 0
    x = functional.pad(x_TH, (0, 0, 0, extra)) if extra else x_TH
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OH, bias_O, "none", [], "")
    return out_TO[:rows]


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply a plain weight by `gemm`, or for many rows by MKL, which is as fast there."""
    if x_TH.shape[0] > MANY_ROWS:
        return functional.linear(x_TH, weight_OH, bias_O)
    return gemm(x_TH, weight_OH, bias_O)


class PackedLinear:
    """x · weightᵀ + bias on weights that `prepare` converts to fp32 and packs.

    Up to `few_rows` rows read the 16-bit weight instead, which has half the bytes.
    """

    def __init__(self, few_rows: int = 0) -> None:
        self.few_rows = few_rows

    def prepare(self, weight_OH: Tensor) -> Tensor:
        """Pack the weight for `__call__`."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight_OH.detach().float(), PACKED_FOR_ROWS
        )
        return packed

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        bias = None if bias_O is None else bias_O.float()
        out_TO: Tensor = gemm(x_TH.float(), weight_OH, bias).to(x_TH.dtype)
        return out_TO
