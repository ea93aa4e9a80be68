"""Norms, ropes and gates in native code, one call each, with the signatures of the reference.

Rows are read in place: queries and keys as parts of the rows of one GEMM. Weights have the type of
their rows.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headway.runtime.native.library import TYPES, NativeLibrary
from headway.runtime.native.lower import recordable

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Numbers of the activations in the module."""


class NativeLayers:
    """The operations of a layer other than GEMMs."""

    def __init__(self, library: NativeLibrary) -> None:
        self._calls = library.calls
        self.gated: dict[str, Callable[[Tensor], Tensor]] = {
            name: partial(self._gated, activation=number) for name, number in ACTIVATIONS.items()
        }

    @recordable("rms_norm")
    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return `reference.rms_norm` of rows (T, H), or of the heads of rows (T, N, D)."""
        assert weight_H.dtype == x_TH.dtype
        x, out_TH = rows_of(x_TH), x_TH.new_empty(x_TH.shape)
        width, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        self._calls.norm(
            x.data_ptr(),
            weight_H.data_ptr(),
            out_TH.data_ptr(),
            x.shape[0] * inner,
            width,
            inner,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            eps,
            offset,
            TYPES[x.dtype],
        )
        return out_TH

    @recordable("rope")
    def rope(self, x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """Return `reference.rope`."""
        x, cos, sin = rows_of(x_TND), cos_TR.contiguous(), sin_TR.contiguous()
        tokens, heads, size = x.shape
        out = x.new_empty(x.shape)
        self._calls.rope(
            x.data_ptr(),
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            size,
            cos.shape[-1],
            x.stride(0),
            x.stride(1),
            heads * size,
            size,
            TYPES[x.dtype],
        )
        return out

    def are_finite(self, x: Tensor) -> bool:
        """Return `reference.are_finite`."""
        x = x.contiguous()
        return bool(self._calls.are_finite(x.data_ptr(), x.numel(), TYPES[x.dtype]))

    @recordable("gated")
    def _gated(self, gate_up_TI2: Tensor, activation: int) -> Tensor:
        x = gate_up_TI2.contiguous()
        tokens, inner = x.shape[0], x.shape[1] // 2
        out = x.new_empty(tokens, inner)
        self._calls.gated(x.data_ptr(), out.data_ptr(), tokens, inner, TYPES[x.dtype], activation)
        return out


def rows_of(x: Tensor) -> Tensor:
    """Return `x` with a dense last dim, as the kernels read rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def layers_are_right(library: NativeLibrary) -> bool:
    """Return whether small norms, ropes and gates have the results of their definition in fp64."""
    draw = torch.Generator().manual_seed(1)
    layers = NativeLayers(library)
    for dtype in TYPES:
        x, weight = torch.randn(5, 46, generator=draw).to(dtype), torch.ones(46, dtype=dtype)
        cos, sin = torch.rand(2, 5, 1, 11, generator=draw)
        wide = x.double()
        low, high, rest = wide.view(5, 2, 23).split((11, 11, 1), -1)
        gate, up = wide.chunk(2, -1)
        pairs = (
            (layers.rms_norm(x, weight, 1e-6), wide / wide.square().mean(-1, True).sqrt()),
            (
                layers.rope(x.view(5, 2, 23), cos, sin),
                torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1),
            ),
            (layers.gated["silu"](x), gate * gate.sigmoid() * up),
            (
                layers.gated["gelu_tanh"](x),
                torch.nn.functional.gelu(gate, approximate="tanh") * up,
            ),
        )
        if not layers.are_finite(x) or layers.are_finite(x / 0):
            return False
        if not all(torch.allclose(a.double(), b, rtol=2e-2, atol=1e-2) for a, b in pairs):
            return False
    return True
