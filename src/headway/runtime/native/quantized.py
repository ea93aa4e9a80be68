"""Linear layers on int8 and int4 weights, activations rounded to int8: see native/quantized.inl.

Rounding the activations is a call of its own, so that an operation before it may do that on its
way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.formats import Format
from headway.runtime.native.library import TYPES, NativeLibrary, address
from headway.runtime.native.lower import recordable
from headway.runtime.rounding import RoundedWeight

INT8_STEP, LONGEST_BLOCK = 64, 64
MOST_INPUTS = 1 << 17
"""Beyond it a sum of products of bytes could leave 32 bits."""


@dataclass(frozen=True, slots=True)
class PackedLevels:
    """A rounded weight in the panels of one instruction set; int8's scales stand beside."""

    panels: Tensor
    scales: Tensor | None
    outputs: int
    inputs: int
    group: int

    @property
    def tensors(self) -> list[Tensor]:
        """What it is of, each in the order of the outputs."""
        return [self.panels] if self.scales is None else [self.panels, self.scales]

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors)

    @property
    def padded(self) -> int:
        """Bytes of a row that it multiplies."""
        return padded_inputs(self.inputs, self.group)

    @property
    def blocks(self) -> int:
        """Sums of such a row that begin with a number of their own."""
        return blocks_of(self.inputs, self.group)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows in int8, padded with zeros; a scale for each, and what their sums begin with.

    All three are flat, and may be longer than the rows that were asked for.
    """

    levels: Tensor
    scales: Tensor
    starts: Tensor

    @staticmethod
    def of(tokens: int, padded: int, blocks: int) -> "RoundedRows":
        """Room for so many rows of `padded` numbers and `blocks` sums."""
        return RoundedRows(
            torch.empty(tokens * padded, dtype=torch.int8),
            torch.empty(tokens),
            torch.empty(tokens * blocks, dtype=torch.int32),
        )


def padded_inputs(inputs: int, group: int) -> int:
    """Bytes of a row of `inputs` numbers."""
    unit = group or INT8_STEP
    return -(-inputs // unit) * unit


def blocks_of(inputs: int, group: int) -> int:
    """Parts of a row whose sums begin with a number of their own; on AVX2, elsewhere fewer."""
    return padded_inputs(inputs, group) // min(group, LONGEST_BLOCK) if group else 1


class NativeQuantizedLinear:
    """x · weightᵀ + bias on rounded weights of a format that it `knows`."""

    few_rows = 0

    def __init__(self, library: NativeLibrary, format: Format) -> None:
        assert self.knows(format)
        self._library = library
        self._rows = RoundedRows.of(0, 0, 0)
        self.format, self.group = format, format.group

    @staticmethod
    def knows(format: Format) -> bool:
        """Whether the kernels read it."""
        return format.ours

    def prepare(self, weight_OH: Tensor) -> PackedLevels:
        """The weight, rounded and in panels: `pack` of `rounding.round_weight`, in one pass."""
        weight = weight_OH.detach().contiguous()
        packed = self._empty(*weight.shape)
        self._library.calls.round_weight(
            address(weight),
            address(packed.panels),
            address(packed.scales),
            packed.outputs,
            packed.inputs,
            self.group,
            TYPES[weight.dtype],
        )
        return packed

    def pack(self, weight: RoundedWeight) -> PackedLevels:
        """Rounded weights in panels; they have this format."""
        assert weight.fits(self.format)
        packed, halves = self._empty(*weight.levels_OH.shape), None
        if packed.scales is None:
            halves = weight.scales_OG.half()
        else:
            packed.scales[: packed.outputs] = weight.scales_OG[:, 0]
        levels = weight.levels_OH.contiguous()
        self._library.calls.pack_quantized(
            address(levels),
            address(halves),
            address(packed.panels),
            packed.outputs,
            packed.inputs,
            self.group,
        )
        return packed

    def _empty(self, outputs: int, inputs: int) -> PackedLevels:
        """Room for a weight; scales of outputs that only fill the last panel are 0."""
        assert inputs <= MOST_INPUTS
        panels, scales = self._sizes(outputs, inputs)
        return PackedLevels(
            torch.empty(panels, dtype=torch.uint8),
            torch.zeros(scales) if scales else None,
            outputs,
            inputs,
            self.group,
        )

    def _sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """(bytes of all panels, scales beside them)."""
        width = 2 * self._library.lanes
        panels = -(-outputs // width)
        if self.group:
            groups = -(-inputs // self.group)
            return panels * groups * width * (2 + self.group // 2), 0
        return panels * width * padded_inputs(inputs, 0), panels * width

    def blob_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight's panels and scales."""
        panels, scales = self._sizes(outputs, inputs)
        return panels + 4 * scales

    def from_blob(self, blob: Tensor, outputs: int, inputs: int) -> PackedLevels:
        """The weight whose panels, and then scales, these bytes are."""
        panels, scales = self._sizes(outputs, inputs)
        beside = blob[panels:].view(torch.float32) if scales else None
        return PackedLevels(blob[:panels], beside, outputs, inputs, self.group)

    def round_rows(self, x: Tensor) -> RoundedRows:
        """Each row of x, contiguous, as levels of -127 … 127 and a scale; until the next call."""
        tokens, inputs = x.shape
        padded, blocks = padded_inputs(inputs, self.group), blocks_of(inputs, self.group)
        rows = self._rows
        if rows.levels.numel() < tokens * padded or rows.scales.numel() < tokens:
            rows = self._rows = RoundedRows.of(tokens, padded, blocks)
        self._library.calls.quantize_rows(
            address(x),
            address(rows.levels),
            address(rows.scales),
            address(rows.starts),
            tokens,
            inputs,
            self.group,
            TYPES[x.dtype],
        )
        return rows

    @recordable("quantized")
    def __call__(self, x_TH: Tensor, weight: PackedLevels, bias_O: Tensor | None) -> Tensor:
        """(T, O) in the type of x; a bias has that type too."""
        rows = self.round_rows(x_TH.contiguous())
        out_TO = torch.empty(x_TH.shape[0], weight.outputs, dtype=x_TH.dtype)
        self._library.calls.quantized(
            address(rows.levels),
            address(rows.scales),
            address(rows.starts),
            address(weight.panels),
            address(weight.scales),
            address(bias_O),
            address(out_TO),
            x_TH.shape[0],
            weight.inputs,
            weight.outputs,
            self.group,
            TYPES[x_TH.dtype],
        )
        return out_TO
