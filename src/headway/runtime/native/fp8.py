"""Linear layers on weights of type e4m3, inputs in bf16: see native/fp8.inl."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.native.library import E4M3, TYPES, NativeLibrary, address
from headway.runtime.native.linear import INPUT_STEP, padded_inputs
from headway.runtime.native.lower import recordable
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """A weight in the panels of one instruction set; scales [O / panel][groups][panel] in fp32."""

    panels: Tensor
    scales: Tensor
    outputs: int
    inputs: int
    group: int

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, each in the order of the outputs."""
        return [self.panels, self.scales]

    @property
    def nbytes(self) -> int:
        return int(self.panels.nbytes + self.scales.nbytes)

    @property
    def padded(self) -> int:
        """Inputs of a panel, padded."""
        return padded_inputs(self.inputs)


class NativeFp8Linear:
    """x · weightᵀ + bias on weights of type e4m3, of a format that it `supports`."""

    few_rows = 0

    def __init__(self, library: NativeLibrary, format: Format) -> None:
        assert self.supports(format)
        self._library = library
        self._scratch = torch.empty(0)
        self.format = format

    @staticmethod
    def supports(format: Format) -> bool:
        """Return whether the kernels read it: scales of outputs, or of groups of whole steps."""
        return format == Format("fp8", format.group) and format.group % INPUT_STEP == 0

    def prepare(self, weight_OH: Tensor) -> PackedFp8:
        raise AssertionError("only a checkpoint has such weights")

    def pack(self, weight: RoundedWeight) -> PackedFp8:
        """Pack numbers of this format in panels."""
        assert weight.fits(self.format)
        outputs, inputs = weight.levels_OH.shape
        panels, scales = self._sizes(outputs, inputs)
        packed = torch.empty(panels, dtype=torch.uint8)
        levels = weight.levels_OH.contiguous()
        self._library.calls.pack_linear(address(levels), address(packed), outputs, inputs, E4M3)
        width = 2 * self._library.lanes
        rows = functional.pad(weight.scales_OG, (0, 0, 0, -outputs % width))
        by_panel = rows.unflatten(0, (-1, width)).transpose(1, 2).contiguous().flatten()
        assert len(by_panel) == scales
        return PackedFp8(packed, by_panel, outputs, inputs, self.format.group)

    def _sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return (bytes of all panels, number of scales)."""
        width, group = 2 * self._library.lanes, self.format.group
        rows = -(-outputs // width) * width
        return rows * padded_inputs(inputs), rows * (-(-inputs // group) if group else 1)

    def blob_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of the panels and scales of a weight."""
        panels, scales = self._sizes(outputs, inputs)
        return panels + 4 * scales

    def from_blob(self, blob: Tensor, outputs: int, inputs: int) -> PackedFp8:
        """Return the weight in these bytes: its panels, then its scales."""
        panels, _ = self._sizes(outputs, inputs)
        scales = blob[panels:].view(torch.float32)
        return PackedFp8(blob[:panels], scales, outputs, inputs, self.format.group)

    @recordable("linear_fp8")
    def __call__(self, x_TH: Tensor, weight: PackedFp8, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x; a bias has that type too."""
        x = x_TH.contiguous()
        out_TO = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype)
        scratch = x.shape[0] * weight.padded
        if self._scratch.numel() < scratch:
            self._scratch = torch.empty(scratch)
        self._library.calls.linear_fp8(
            address(x),
            address(weight.panels),
            address(weight.scales),
            address(bias_O),
            address(out_TO),
            address(self._scratch),
            x.shape[0],
            weight.inputs,
            weight.outputs,
            weight.group,
            TYPES[x.dtype],
        )
        return out_TO
