"""Linear layers that hold several matrices of a checkpoint, concatenated by outputs.

With one format, q, k and v are one matrix. With several, each run of equal formats is a matrix of
its own, with its own kernel:

    q int4 | k int4 | v int8        a product of q and k, a product of v, side by side
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from headway.runtime.kernels.grouped import GroupedLinear, Visits
from headway.runtime.native.lower import recordable
from headway.runtime.rounding import RoundedWeight, round_fp8, round_weight
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True)
class Parts:
    """The prepared matrices, in the order of the outputs, and the kernel of each."""

    matrices: list[Any]
    kernels: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(num_bytes(matrix) for matrix in self.matrices)


def num_bytes(prepared: Any) -> int:
    """Return the bytes of a prepared weight; one that torch packed has no `nbytes`."""
    if isinstance(prepared, Tensor):
        return int(prepared.numel() * prepared.element_size())
    return int(prepared.nbytes)


def pack_parts(kernel: Any, parts: Sequence[RoundedWeight | Tensor], outputs: Sequence[int]) -> Any:
    """Pack matrices, concatenated by outputs, for `kernel`; some may be rounded already.

    Those of one kernel are joined; plain ones, and FP8 for a kernel of int8, are rounded as at
    load. `outputs` are the outputs of each.
    """
    if isinstance(kernel, PartsLinear):
        remaining = iter(parts)
        runs = [[next(remaining) for _ in range(count)] for count in kernel.counts(outputs)]
        pairs = zip(kernel.kernels, runs, kernel.outputs, strict=True)
        matrices = [pack_parts(one, run, [size]) for one, run, size in pairs]
        return Parts(matrices, kernel.kernels)
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return kernel.prepare(torch.cat(plain))
    return kernel.pack(RoundedWeight.joined([to_format(kernel.format, part) for part in parts]))


def to_format(format: Format, part: RoundedWeight | Tensor) -> RoundedWeight:
    """Return a part, rounded to the format of its layer."""
    if isinstance(part, Tensor):
        return round_weight(part, format.group, format.rotated)
    if part.kind == "fp8" and format.kind == "int8":
        return round_fp8(part, format.rotated)
    return part


def stack_matrices(kernel: Any, matrices: list[Any]) -> Any:
    """Stack the prepared matrices of all experts."""
    if isinstance(matrices[0], Tensor):
        return torch.stack([one.contiguous() for one in matrices])
    return kernel.stack(matrices)


class PartsLinear(GroupedLinear):
    """x · weightᵀ + bias, the outputs of each matrix by its own kernel."""

    def __init__(self, kernels: list[Any], outputs: list[int]) -> None:
        self.kernels, self.outputs = kernels, outputs

    @property
    def groups(self) -> bool:
        """Whether each kernel takes all experts at once."""
        return all(isinstance(one, GroupedLinear) and one.groups for one in self.kernels)

    def for_experts(self) -> "PartsLinear":
        """Return a `PartsLinear` of the kernels for experts."""
        own = [one.for_experts() if hasattr(one, "for_experts") else one for one in self.kernels]
        return PartsLinear(own, self.outputs)

    def stack(self, prepared: list[Parts]) -> Parts:
        """Stack each matrix of all experts."""
        columns = zip(*(one.matrices for one in prepared), strict=True)
        pairs = zip(self.kernels, columns, strict=True)
        return Parts([stack_matrices(one, list(column)) for one, column in pairs], self.kernels)

    def grouped(
        self, x_VH: Tensor, weight: Parts, bias_EO: Tensor | None, visits: Visits
    ) -> Tensor:
        none = [None] * len(self.kernels)
        biases = none if bias_EO is None else bias_EO.split(self.outputs, 1)
        parts = zip(self.kernels, weight.matrices, biases, strict=True)
        return torch.cat(
            [one.grouped(x_VH, matrix, bias, visits) for one, matrix, bias in parts], 1
        )

    def prepare(self, weight_OH: Tensor) -> Parts:
        """Pack each matrix for its kernel."""
        parts = weight_OH.split(self.outputs)
        pairs = zip(self.kernels, parts, strict=True)
        return Parts([one.prepare(part) for one, part in pairs], self.kernels)

    def counts(self, parts: Sequence[int]) -> list[int]:
        """Return the number of parts, with these outputs, in each matrix."""
        ends = [*accumulate(parts)]
        part_ends = [ends.index(end) + 1 for end in accumulate(self.outputs)]
        return [end - begin for begin, end in pairwise([0, *part_ends])]

    @recordable("parts")
    def __call__(self, x_TH: Tensor, weight: Parts, bias_O: Tensor | None) -> Tensor:
        """Return (T, O) in the type of x."""
        biases = [None] * len(self.kernels) if bias_O is None else bias_O.split(self.outputs)
        parts = zip(self.kernels, weight.matrices, biases, strict=True)
        return torch.cat([kernel(x_TH, matrix, bias) for kernel, matrix, bias in parts], -1)
