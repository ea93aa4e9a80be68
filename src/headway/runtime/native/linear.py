"""Linear layers in the type of the checkpoint: 16-bit weights stay 16 bits wide, and are packed.

An AVX2 core converts bf16 as it reads, so that a GEMM reads half the bytes of an fp32 one and
multiplies as fast; see native/linear.inl.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.runtime.native.library import TYPES, NativeLibrary, address
from headway.runtime.native.lower import recordable

INPUT_STEP = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight (outputs, inputs) in the panels of one instruction set."""

    panels: Tensor
    outputs: int
    inputs: int
    dtype: torch.dtype

    @property
    def padded(self) -> int:
        """Inputs of a panel, padded."""
        return padded_inputs(self.inputs)

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors."""
        return [self.panels]

    @property
    def nbytes(self) -> int:
        return int(self.panels.nbytes)


def padded_inputs(inputs: int) -> int:
    """Return the inputs of a panel: padded with zeros to whole steps."""
    return -(-inputs // INPUT_STEP) * INPUT_STEP


class NativeLinear:
    """x · weightᵀ + bias on packed weights, sums in fp32. `dtype` is the type of blobs."""

    few_rows = 0

    def __init__(self, library: NativeLibrary, dtype: torch.dtype = torch.float32) -> None:
        self._library, self._dtype = library, dtype
        self._scratch = torch.empty(0)

    def prepare(self, weight_OH: Tensor) -> PackedWeight:
        """Pack a weight in panels of the same type, with outputs and inputs rounded up."""
        weight = weight_OH.detach().contiguous()
        outputs, inputs = weight.shape
        panels = torch.empty(self._size(outputs, inputs), dtype=weight.dtype)
        self._library.calls.pack_linear(
            address(weight), address(panels), outputs, inputs, TYPES[weight.dtype]
        )
        return PackedWeight(panels, outputs, inputs, weight.dtype)

    def _size(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the outputs and inputs of all panels."""
        width = 2 * self._library.lanes
        return -(-outputs // width) * width, padded_inputs(inputs)

    def blob_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of the panels of a weight."""
        return math.prod(self._size(outputs, inputs)) * self._dtype.itemsize

    def from_blob(self, blob: Tensor, outputs: int, inputs: int) -> PackedWeight:
        """Return the weight with these bytes as panels."""
        panels = blob.view(self._dtype).view(self._size(outputs, inputs))
        return PackedWeight(panels, outputs, inputs, self._dtype)

    @recordable("linear")
    def __call__(self, x_TH: Tensor, weight: PackedWeight, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x; a bias has that type too."""
        x = x_TH.contiguous()
        out_TO = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype)
        scratch = x.shape[0] * weight.padded
        if self._scratch.numel() < scratch:
            self._scratch = torch.empty(scratch)
        self._library.calls.linear(
            address(x),
            address(weight.panels),
            address(bias_O),
            address(out_TO),
            address(self._scratch),
            x.shape[0],
            weight.inputs,
            weight.outputs,
            TYPES[x.dtype],
            TYPES[weight.dtype],
        )
        return out_TO
