"""A quantized matrix as its file stores it, and what all layouts share.

O outputs, H inputs, G groups of inputs that share a scale.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.checkpoint_files import TensorEntry, shown
from headway.runtime.quantized.scheme import Scheme
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format, Kind

KERNEL_GROUPS = {"int4": (128, 64, 32), "int8": (128, 64, 32, 16)}
"""Kind → group sizes that kernels read, the best first; larger groups repeat their scales."""
MAX_ZERO_GROUPS = 4096
"""Groups with a scale of 0 that are examined in a matrix; a padded vocabulary has many."""
FLOAT_TYPES = ("F16", "BF16", "F32")
"""Types of the scales of integer levels."""
QUANTIZE_AGAIN = "Quantize the model again, or copy the file again."
SAME_MODEL = "Check bits and group size in quantization_config, and that all is of one model."


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of a checkpoint: `tensors` by suffix (`qweight`), `read` reads a tensor by its full
    name.

    `shift` is added to GPTQ's stored zeros.
    """

    name: str
    scheme: Scheme
    tensors: dict[str, TensorEntry]
    read: Callable[[str], Tensor]
    shift: int = 0

    def tensor(self, suffix: str) -> Tensor:
        """Read the tensor with this suffix."""
        return self.read(f"{self.name}.{suffix}")

    def fail(self, suffix: str, what: str, fix: str = QUANTIZE_AGAIN) -> NoReturn:
        """Raise the CheckpointError that names one of the tensors."""
        raise CheckpointError(f"{shown(self.name)}.{suffix} {what}.", fix)

    def expect(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has one of these types and shapes."""
        entry, label = self.tensors[suffix], self.scheme.label
        if entry.dtype not in dtypes:
            self.fail(
                suffix, f"is of type {entry.dtype}; {label} has {' or '.join(dtypes)}", SAME_MODEL
            )
        if entry.shape not in shapes:
            implied = " or ".join(str(list(shape)) for shape in shapes)
            shape = list(entry.shape)
            self.fail(suffix, f"has shape {shape}; {label} implies {implied}", SAME_MODEL)

    def expect_scales(
        self, suffix: str, dtypes: tuple[str, ...], outputs: int, groups: int
    ) -> None:
        """Check a tensor of shape (outputs, groups); with one group, shapes of one number per
        output or of a single number are also allowed."""
        flat: list[tuple[int, ...]] = [(outputs,), (1,), (1, 1), ()] if groups == 1 else []
        self.expect(suffix, dtypes, (outputs, groups), *flat)

    def expect_matrix(self, suffix: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Return the shape of a nonempty matrix. Raises CheckpointError for other tensors."""
        shape = self.tensors[suffix].shape
        if len(shape) != 2 or not all(shape):
            self.fail(suffix, f"has shape {list(shape)}, which is not that of a matrix", SAME_MODEL)
        self.expect(suffix, dtypes, shape)
        return shape[0], shape[1]


class QuantParams(NamedTuple):
    """All of a matrix except its levels, as in `RoundedWeight`."""

    kind: Kind
    shape: tuple[int, int]
    group: int
    scales_OG: Tensor
    offsets_OG: Tensor | None = None
    order_H: Tensor | None = None

    def weight(self, levels_OH: Tensor) -> RoundedWeight:
        """Return the matrix with these levels."""
        scales, offsets = self.scales_OG, self.offsets_OG
        return RoundedWeight(levels_OH, scales, self.group, offsets, self.order_H, self.kind)

    @property
    def format(self) -> Format:
        """The narrowest format that holds the matrix exactly."""
        dtype = torch.float8_e4m3fn if self.kind == "fp8" else torch.int8
        return self.weight(torch.empty(1, 1, dtype=dtype).expand(*self.shape)).format


class Layout(NamedTuple):
    """How tensors make a matrix: the suffixes it needs, and those it may have."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    params: Callable[[StoredMatrix], QuantParams]
    """Reads and checks all except the levels."""
    levels: Callable[[StoredMatrix], Tensor]
    """Reads the levels (O, H), inputs in the model's order."""
    scale: str
    """Suffix of the scales, for errors."""

    def weight(self, matrix: StoredMatrix) -> RoundedWeight:
        """Return the matrix. Raises CheckpointError that names a tensor with impossible numbers."""
        params = self.params(matrix)
        levels = self.levels(matrix)
        if params.order_H is not None:
            levels = levels[:, params.order_H]
        weight = params.weight(levels.contiguous())
        check_zero_scales(matrix, self.scale, weight)
        return weight


def group_size(matrix: StoredMatrix, inputs: int) -> int:
    """Return the inputs of a group, all for 0. Raises CheckpointError if it divides badly."""
    group = matrix.scheme.group
    if group and inputs % group:
        raise CheckpointError(
            f"{shown(matrix.name)} has {inputs} inputs, which groups of {group} do not divide.",
            "Check the group size in quantization_config.",
        )
    return group or inputs


def kernel_group(kind: Kind, group: int, inputs: int) -> int:
    """Return the kernel's group size that holds, with repeated scales, groups of `group` inputs.

    int4: 256 → 128, 96 → 32; all of 896 or 100 inputs → 128, the last group shorter. int8: all → 0.
    """
    if group >= inputs:
        return 0 if kind == "int8" else KERNEL_GROUPS[kind][0]
    return next(size for size in KERNEL_GROUPS[kind] if group % size == 0)


def repeat_groups(numbers_OG: Tensor, group: int, size: int, inputs: int) -> Tensor:
    """Return numbers of groups of `group` inputs as those of groups of `size`, contiguous."""
    groups = -(-inputs // size) if size else 1
    times = groups if group >= inputs else group // size
    return numbers_OG.repeat_interleave(times, 1).contiguous()


def read_scales(matrix: StoredMatrix, suffix: str, *, signed: bool = False) -> Tensor:
    """Return scales in fp32. Raises CheckpointError for NaN, infinity, a wrong sign."""
    scales = matrix.tensor(suffix).float()
    if not bool(torch.isfinite(scales).all()):
        matrix.fail(suffix, "holds a scale that is NaN or infinite")
    if not signed and bool((scales < 0).any()):
        matrix.fail(suffix, f"holds a negative scale, which {matrix.scheme.label} does not have")
    return scales


def check_zero_scales(matrix: StoredMatrix, suffix: str, weight: RoundedWeight) -> None:
    """Raise CheckpointError where a scale is 0 and the levels of its group are not all equal.

    Such weights are lost: the scale was below the range of fp16, or a part of the file was not
    written.
    """
    rows, groups = (weight.scales_OG == 0).nonzero()[:MAX_ZERO_GROUPS].T
    size = weight.group or weight.levels_OH.shape[1]
    for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
        levels = weight.levels_OH[row, group * size : (group + 1) * size].float()
        if bool(levels.min() != levels.max()):
            matrix.fail(
                suffix,
                f"holds a scale of 0 for weights that are not (output {row}, group {group})",
                "Quantize the model again with wider scales, or copy the file again.",
            )


def read_order(matrix: StoredMatrix, suffix: str, inputs: int, group: int) -> Tensor | None:
    """Return the inputs in the order of their groups, None where that is the model's order.

    Groups of 2: [1 0 0 1] → [1 2 0 3]. Raises CheckpointError unless every group has its inputs.
    """
    matrix.expect(suffix, ("I32", "I64"), (inputs,))
    index = matrix.tensor(suffix).long()
    if bool((index == -1).all()):  # compressed-tensors writes -1 for no order
        return None
    groups = -(-inputs // group)
    if groups > 1 and not bool(index.any()):
        matrix.fail(
            suffix,
            f"holds only zeros for {groups} groups: its writer never filled it",
            "Quantize the model again, with desc_act false or a newer version of the writer.",
        )
    if int(index.min()) < 0 or int(index.max()) >= groups:
        matrix.fail(suffix, f"names groups beyond the {groups} of the matrix")
    if bool((index.bincount(minlength=groups)[:-1] != group).any()):
        matrix.fail(suffix, f"does not give {group} inputs to every group")
    order = index.argsort(stable=True)
    return None if bool((order == torch.arange(inputs)).all()) else order


def codes_along_inputs(words: Tensor, bits: int) -> Tensor:
    """Return the codes (O, W · 32 / bits) of int32 words (O, W), lowest bits first, as bytes."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else split_nibbles(numbers)


def split_nibbles(numbers: Tensor) -> Tensor:
    """Return the halves (O, 2 · W) of bytes (O, W), lower ones first."""
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def signed_levels(codes: Tensor, bits: int) -> Tensor:
    """Return the codes of 4 or 8 bits minus 8 or 128, in int8."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def num_words(count: int, bits: int) -> int:
    """Return the int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def common_format(formats: list[Format]) -> Format:
    """Return the narrowest format for matrices of these formats, of one kind and group."""
    offsets = max((format.offsets for format in formats), key=("none", "zeros", "any").index)
    wide = any(format.fp32_scales for format in formats)
    supers = {(format.super_block, format.offsets) for format in formats}
    super_block = formats[0].super_block if len(supers) == 1 else 0
    return replace(formats[0], fp32_scales=wide, offsets=offsets, super_block=super_block)
