"""Collective operations of the ranks of a model."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from headway.core.errors import ExecutorLostError


class RankLostError(ExecutorLostError):
    """A rank did not come to a collective operation, or ended: the engine must restart."""


class RankGroup(Protocol):
    """Collective operations: all ranks call the same methods in the same order."""

    rank: int
    size: int

    def sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        """Return the sum of the parts of all ranks, (T, H), in the type of a part. It is added in
        fp32 in the order of the ranks, so it is the same on every rank. Raises RankLostError."""
        ...

    def broadcast(self, x_TH: Tensor) -> Tensor:
        """Return rank 0's `x_TH`; all ranks pass its shape and type. Raises RankLostError."""
        ...

    def concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the columns of all ranks, (R, sum of `sizes`), of which rank r has `sizes[r]`. The
        result is valid until the next call. Raises RankLostError."""
        ...

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all ranks' rows, (sum of `counts`, W), in order. Raises RankLostError."""
        ...

    def leave(self) -> None:
        """Leave for good after an error on this rank, so that the others do not wait for it."""
        ...


RankGroups = tuple[RankGroup | None, RankGroup | None]
"""Of a rank: those that share its layers, and those that share its contexts."""


class SingleRank:
    """A group of one rank."""

    rank, size = 0, 1

    def sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        return ordered_sum(parts_TH)

    def broadcast(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        return own_RP

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        return own_RW

    def leave(self) -> None:
        pass


def ordered_sum(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of the parts in their order, added in fp32 and rounded once, to their type.

    The sum of two parts in their own type has the same bits, so it is computed in that type.

    >>> import torch
    >>> one, small = torch.ones(1).bfloat16(), torch.full((1,), 0.003).bfloat16()
    >>> ordered_sum([one, small]).item(), ordered_sum([one, small, small]).item()
    (1.0, 1.0078125)
    """
    first, *others = parts
    if len(others) == 1:
        return first + others[0]
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(first.dtype)
