"""Multiply all experts of a layer in one launch; the router's choice stays on the device.

The visits of a step are sorted by expert, with a tensor of the start of each expert: a kernel cuts
them into tiles of EXPERT_TILE rows of one expert. The number of tiles depends on the router's
choice, so the maximum is launched, and unused tiles end at once. Worked example, tiles of 64 rows,
4 experts with 70, 0, 3 and 64 visits of 137:

    starts  [0 70 70 73 137]     tiles  [0 2 2 3 4]     launched  137 // 64 + 4 = 6

V visits, E experts, K experts of a token, T tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EXPERT_TILE = 64
"""Rows of a tile, for every batch."""


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of a step by expert; all on the device.

    `order_V` are their indices among (token, rank) pairs; `starts_E1` is the first visit of each
    expert, and `tiles_E1` its first tile, both int32 with the total at the end.
    """

    order_V: Tensor
    starts_E1: Tensor
    tiles_E1: Tensor

    @property
    def num_read(self) -> Tensor:
        """The number of visited experts, an int64 without dims."""
        return (self.starts_E1[1:] > self.starts_E1[:-1]).sum()


def visits_of(experts_TK: Tensor, count: int) -> Visits:
    """Return the visits to `count` experts, those of an expert in the order of the tokens."""
    sorted_V, order_V = experts_TK.flatten().sort(stable=True)
    ids_E1 = torch.arange(count + 1, device=experts_TK.device)
    starts_E1 = torch.searchsorted(sorted_V, ids_E1)
    tiles_E = (starts_E1.diff() + EXPERT_TILE - 1).div(EXPERT_TILE, rounding_mode="floor")
    tiles_E1 = torch.nn.functional.pad(tiles_E.cumsum(0), (1, 0))
    return Visits(order_V, starts_E1.int(), tiles_E1.int())


def max_tiles(visits: int, experts: int) -> int:
    """Return the maximum of tiles of `visits` visits: the last tile of each expert may be short.

    >>> max_tiles(137, 4), max_tiles(2, 4)
    (6, 2)
    """
    return visits // EXPERT_TILE + min(experts, visits)


class GroupedLinear(ABC):
    """A linear kernel of a device that can also multiply all experts at once."""

    few_rows = 0

    @property
    def groups(self) -> bool:
        """Whether it can; not for a format with permuted inputs."""
        return True

    def for_experts(self) -> "GroupedLinear":
        """Return the kernel for experts of this format."""
        return self

    @abstractmethod
    def stack(self, prepared: list[Any]) -> Any:
        """Stack the prepared matrices of all experts."""
        ...

    @abstractmethod
    def grouped(self, x_VH: Tensor, weight: Any, bias_EO: Tensor | None, visits: Visits) -> Tensor:
        """Return each row times the matrix of its expert plus bias, (V, O)."""
        ...
