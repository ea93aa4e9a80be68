"""Whose queries are watched, and what they gave keys so far; `runtime.watching` fills it."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Watched:
    """Of one sequence: by layer the scores that the queries begin … end - 1 have given its keys."""

    __slots__ = ("begin", "end", "scores", "waiting")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.scores: dict[int, Tensor] = {}
        """(KV heads, end) in fp32; whole once the query `end` - 1 was seen."""
        self.waiting: dict[int, Tensor] = {}
        """The queries of a tile that is not whole, (tile, query heads, D)."""


class Seen(NamedTuple):
    """Tokens of a batch whose queries are watched: those of its row `row`, `length` from the
    batch's token `at` on, the first at `position`."""

    watched: Watched
    row: int
    at: int
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Of one step: whom to watch, in the layers of these KV groups."""

    groups: tuple[int, ...]
    rows: list[Seen]
