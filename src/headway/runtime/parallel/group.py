"""What the ranks of a model do together: add up what each has computed."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from headway.core.errors import ExecutorLostError


class RankLostError(ExecutorLostError):
    """Another rank did not come to a sum in time, or is gone: the engine has to begin again."""


class RankGroup(Protocol):
    """All ranks call the same methods in the same order."""

    rank: int
    size: int

    def sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        """The sum of the parts of all ranks, (T, H), in the type of one: added in fp32, the first
        rank's first, so that it is the same on every rank; RankLostError."""
        ...

    def broadcast(self, x_TH: Tensor) -> Tensor:
        """Rank 0's `x_TH`, whose shape and type all have; RankLostError."""
        ...

    def concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        """The columns of all ranks, (R, sum of `sizes`), rank r's `sizes[r]` of them; valid until
        the next call; RankLostError."""
        ...

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, (sum of `counts`, W), rank 0's first; RankLostError."""
        ...

    def leave(self) -> None:
        """Come to nothing any more: this rank raised, and the others should not wait for it."""
        ...


RankGroups = tuple[RankGroup | None, RankGroup | None]
"""Of a rank: who computes layers together with it, and who holds the other parts of contexts."""


class SingleRank:
    """One rank."""

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
    """The parts added in fp32 in their order, rounded once, to their type; two are so alone.

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
