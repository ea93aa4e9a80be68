"""Linear layers on rounded weights, activations rounded to int8: see native/quantized.inl.

Rounding the activations is a call of its own, so that a previous operation may do it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.runtime.native.library import TYPES, NativeLibrary, address
from headway.runtime.native.lower import recordable
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format

INT8_STEP = 64
MAX_INPUTS = 1 << 17
"""With more inputs a sum of products of bytes could overflow 32 bits."""


IN_BYTES, IN_FP32, WITH_ZEROS, WITH_OFFSETS, IN_SUPERS, IS_ROTATED = (
    1 << bit for bit in range(16, 22)
)
"""Flags of `Layout` in native/table.h: differences from int4 with fp16 scales."""
KNOWN_GROUPS = {"int4": (32, 64, 128), "int8": (0, 16, 32, 64, 128)}


@dataclass(frozen=True, slots=True)
class PackedLevels:
    """A rounded weight in the panels of one instruction set.

    Scales of whole outputs and the order of permuted inputs are tensors of their own.
    """

    panels: Tensor
    scales: Tensor | None
    order: Tensor | None
    outputs: int
    inputs: int
    format: Format

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, all but `order` in the order of the outputs."""
        return [part for part in (self.panels, self.scales, self.order) if part is not None]

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors)

    @property
    def layout(self) -> int:
        return layout_of(self.format)

    @property
    def scratch_bytes(self) -> int:
        """Scratch of one row of inputs: levels, scales, starts and values of sums."""
        return padded_inputs(self.inputs, self.format) + 4 * sum(
            row_counts(self.inputs, self.format)
        )


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows in int8, padded with zeros; scales of blocks, starts of unit sums, sums of groups.

    All are flat, and may be longer than the rows need.
    """

    levels: Tensor
    scales: Tensor
    starts: Tensor
    sums: Tensor | None

    @staticmethod
    def of(tokens: int, inputs: int, format: Format) -> "RoundedRows":
        """Allocate room for `tokens` rows."""
        blocks, units, groups = row_counts(inputs, format)
        return RoundedRows(
            torch.empty(tokens * padded_inputs(inputs, format), dtype=torch.int8),
            torch.empty(tokens * blocks),
            torch.empty(tokens * units, dtype=torch.int32),
            torch.empty(tokens * groups) if groups else None,
        )


def layout_of(format: Format) -> int:
    """Return the number of a format in the kernels."""
    layout = format.group
    layout |= IN_BYTES if format.kind == "int8" and format.group else 0
    layout |= IN_SUPERS if format.super_block else IN_FP32 if format.fp32_scales else 0
    layout |= IS_ROTATED if format.rotated else 0
    return layout | {"none": 0, "zeros": WITH_ZEROS, "any": WITH_OFFSETS}[format.offsets]


def padded_inputs(inputs: int, format: Format) -> int:
    """Return the padded bytes of a row of `inputs` levels."""
    unit = format.group or INT8_STEP
    return -(-inputs // unit) * unit


def row_counts(inputs: int, format: Format) -> tuple[int, int, int]:
    """Return (blocks, units, groups with sums of inputs) of a row."""
    padded = padded_inputs(inputs, format)
    groups = padded // format.group if format.offsets != "none" else 0
    return -(-padded // format.block), -(-padded // format.unit), groups


class NativeQuantizedLinear:
    """x · weightᵀ + bias on rounded weights of a format that it `supports`."""

    few_rows = 0

    def __init__(self, library: NativeLibrary, format: Format) -> None:
        assert self.supports(format)
        self._library = library
        self._rows = RoundedRows.of(0, 0, format)
        self.format = format

    @staticmethod
    def supports(format: Format) -> bool:
        """Return whether the kernels read it: groups of any format, whole outputs in plain int8."""
        whole = not format.group and (format.fp32_scales or format.offsets != "none")
        if format.rotated and (format.group or format.permuted):
            return False
        if format.super_block and (format.offsets == "zeros" or not format.group):
            return False
        return format.group in KNOWN_GROUPS.get(format.kind, ()) and not whole

    def prepare(self, weight_OH: Tensor) -> PackedLevels:
        """Round and pack a weight: `pack` of `rounding.round_weight`, in one pass."""
        assert self.format.ours, "only a checkpoint has such weights"
        weight = weight_OH.detach().contiguous()
        packed = self._empty(*weight.shape)
        self._library.calls.round_weight(
            address(weight),
            address(packed.panels),
            address(packed.scales),
            packed.outputs,
            packed.inputs,
            packed.layout,
            TYPES[weight.dtype],
        )
        return packed

    def pack(self, weight: RoundedWeight) -> PackedLevels:
        """Pack rounded weights of this format in panels."""
        assert weight.fits(self.format)
        packed = self._empty(*weight.levels_OH.shape)
        if packed.scales is not None:
            packed.scales[: packed.outputs] = weight.scales_OG[:, 0]
        scales, offsets = self._scales_and_offsets(weight)
        if packed.order is not None:
            assert weight.order_H is not None
            packed.order.copy_(weight.order_H)
        levels = weight.levels_OH.contiguous()
        given = [address(each) for each in (levels, scales, offsets, packed.panels)]
        self._library.calls.pack_quantized(*given, packed.outputs, packed.inputs, packed.layout)
        return packed

    def _scales_and_offsets(self, weight: RoundedWeight) -> tuple[Tensor | None, Tensor | None]:
        """Return (scales, offsets) as `PackWeight` of native/table.h reads them."""
        if not self.format.group:
            return None, None
        if self.format.super_block:
            assert weight.supers is not None
            return weight.supers.codes_KOG.contiguous(), weight.supers.factors_KOS.contiguous()
        scales = weight.scales_OG.contiguous()
        return scales if self.format.fp32_scales else scales.half(), self._offsets_of(weight)

    def _offsets_of(self, weight: RoundedWeight) -> Tensor | None:
        """Return the offsets of the panels; zeros where the weight has none."""
        if self.format.offsets == "none":
            return None
        if self.format.offsets == "zeros":
            zeros = weight.zeros()
            return torch.zeros_like(weight.scales_OG, dtype=torch.int8) if zeros is None else zeros
        if weight.offsets_OG is None:
            return torch.zeros_like(weight.scales_OG)
        return weight.offsets_OG.contiguous()

    def _empty(self, outputs: int, inputs: int) -> PackedLevels:
        """Allocate a weight; scales of padding outputs of the last panel are 0."""
        assert inputs <= MAX_INPUTS
        panels, scales, order = self._sizes(outputs, inputs)
        return PackedLevels(
            torch.empty(panels, dtype=torch.uint8),
            torch.zeros(scales) if scales else None,
            torch.empty(order, dtype=torch.int32) if order else None,
            outputs,
            inputs,
            self.format,
        )

    def _sizes(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Return (bytes of all panels, number of separate scales, length of the order)."""
        width, format = 2 * self._library.lanes, self.format
        panels, padded = -(-outputs // width), padded_inputs(inputs, format)
        order = inputs if format.permuted else 0
        if not format.group:
            return panels * width * padded, panels * width, order
        groups = padded // format.group
        levels = format.group // 2 if format.kind == "int4" else format.group
        if format.super_block:
            numbers = 1 if format.offsets == "none" else 2
            shared = -(-padded // format.super_block) * numbers * 2 * width
            each = groups * width * (levels + numbers)
            return panels * (each + -(-shared // 64) * 64), 0, order
        numbers = (4 if format.fp32_scales else 2) + (4 if format.offsets == "any" else 0)
        zeros = -(-groups * width // 64) * 64 if format.offsets == "zeros" else 0
        return panels * (groups * width * (levels + numbers) + zeros), 0, order

    def blob_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of the panels, scales and order of a weight."""
        panels, scales, order = self._sizes(outputs, inputs)
        return panels + 4 * (scales + order)

    def from_blob(self, blob: Tensor, outputs: int, inputs: int) -> PackedLevels:
        """Return the weight in these bytes: its panels, then scales, then order."""
        panels, scales, order = self._sizes(outputs, inputs)
        _, scale_bytes, order_bytes = blob.split((panels, 4 * scales, 4 * order))
        return PackedLevels(
            blob[:panels],
            scale_bytes.view(torch.float32) if scales else None,
            order_bytes.view(torch.int32) if order else None,
            outputs,
            inputs,
            self.format,
        )

    def round_rows(self, x: Tensor, order: Tensor | None = None) -> RoundedRows:
        """Round each row of a contiguous x to levels of -127 … 127; valid until the next call."""
        tokens, inputs = x.shape
        rows, (blocks, units, groups) = self._rows, row_counts(inputs, self.format)
        needed = (
            (rows.levels, padded_inputs(inputs, self.format)),
            (rows.scales, blocks),
            (rows.starts, units),
            (rows.sums, groups),
        )
        if any(part is not None and part.numel() < tokens * size for part, size in needed):
            rows = self._rows = RoundedRows.of(tokens, inputs, self.format)
        self._library.calls.quantize_rows(
            address(x),
            address(rows.levels),
            address(rows.scales),
            address(rows.starts),
            address(rows.sums),
            address(order),
            tokens,
            inputs,
            layout_of(self.format),
            TYPES[x.dtype],
        )
        return rows

    @recordable("quantized")
    def __call__(self, x_TH: Tensor, weight: PackedLevels, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x; a bias has that type too."""
        rows = self.round_rows(x_TH.contiguous(), weight.order)
        out_TO = torch.empty(x_TH.shape[0], weight.outputs, dtype=x_TH.dtype)
        self._library.calls.quantized(
            address(rows.levels),
            address(rows.scales),
            address(rows.starts),
            address(rows.sums),
            address(weight.panels),
            address(weight.scales),
            address(bias_O),
            address(out_TO),
            x_TH.shape[0],
            weight.inputs,
            weight.outputs,
            weight.layout,
            TYPES[x_TH.dtype],
        )
        return out_TO
