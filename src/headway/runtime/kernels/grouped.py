"""Products of the experts of a layer at once, from numbers that stay on the device.

The visits of a step are sorted by expert, and where each expert's begin is a tensor: a kernel cuts
them into tiles of EXPERT_TILE rows of one expert each. How many tiles there are depends on what was
chosen, so as many are launched as there could be, and those that nobody needs end at once. Worked
example, tiles of 64 rows, 4 experts with 70, 0, 3 and 64 visits of 137:

    starts  [0 70 70 73 137]     tiles  [0 2 2 3 4]     launched  137 // 64 + 4 = 6

V visits, E experts, K experts of a token, T tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EXPERT_TILE = 64
"""Rows of a tile, whoever else is there."""


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of a step by expert; all on the device.

    `order_V` are their places among (token, rank) pairs; `starts_E1` says where each expert's
    begin among them, and `tiles_E1` where its tiles do, both int32 with the total behind.
    """

    order_V: Tensor
    starts_E1: Tensor
    tiles_E1: Tensor

    @property
    def num_read(self) -> Tensor:
        """How many experts somebody visits, an int64 without dims."""
        return (self.starts_E1[1:] > self.starts_E1[:-1]).sum()


def visits_of(experts_TK: Tensor, count: int) -> Visits:
    """The visits to `count` experts, each expert's in the order of the tokens."""
    sorted_V, order_V = experts_TK.flatten().sort(stable=True)
    ids_E1 = torch.arange(count + 1, device=experts_TK.device)
    starts_E1 = torch.searchsorted(sorted_V, ids_E1)
    tiles_E = (starts_E1.diff() + EXPERT_TILE - 1).div(EXPERT_TILE, rounding_mode="floor")
    tiles_E1 = torch.nn.functional.pad(tiles_E.cumsum(0), (1, 0))
    return Visits(order_V, starts_E1.int(), tiles_E1.int())


def max_tiles(visits: int, experts: int) -> int:
    """As many tiles as so many visits can have: each expert's last may be short.

    >>> max_tiles(137, 4), most_tiles(2, 4)
    (6, 2)
    """
    return visits // EXPERT_TILE + min(experts, visits)


class GroupedLinear(ABC):
    """A linear kernel of a device that multiplies the matrices of all experts at once, too."""

    few_rows = 0

    @property
    def groups(self) -> bool:
        """Whether it does; one of inputs in an order of their own does not."""
        return True

    def for_experts(self) -> "GroupedLinear":
        """The kernel of experts' matrices of this format."""
        return self

    @abstractmethod
    def stack(self, prepared: list[Any]) -> Any:
        """The prepared matrices of all experts as one."""
        ...

    @abstractmethod
    def grouped(self, x_VH: Tensor, weight: Any, bias_EO: Tensor | None, visits: Visits) -> Tensor:
        """Each row times its expert's matrix, plus its bias, (V, O); rows sorted by expert."""
        ...
