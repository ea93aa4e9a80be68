"""Collective operations of ranks of one machine in shared memory.

Each rank has two places in a file that all have mapped, and a turn, a number that only it writes.
In operation t it writes its parts into place t % 2, then t as its turn; when all turns have reached
t it reads the places of all ranks. Two places are enough: a rank that writes for t + 2 has seen all
others begin t + 1, and so end reading t.

    rank 0   write A, turn 7 ── wait for 7 ── read A B       rank 1   write B, turn 7 ── …

The other ranks must see the writes of one rank in their order. x86 keeps stores in order; other
CPUs need fences that Python does not have, so they use `torch.distributed`.
"""

import mmap
import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from headway.core.clock import SystemClock
from headway.runtime.parallel.group import RankLostError, ordered_sum

PLACE_BYTES = 2**20
"""Bytes of one rank and operation; larger ones are done some rows at a time."""
LOGITS_BYTES = 2**25
"""Bytes of the logits of some rows: 55 rows of 152,000 tokens; more rows come in pieces."""
DEPARTED_TURN = -1
"""The turn of a rank that has left."""
CACHE_LINE_BYTES = 64
"""Each turn has a cache line of its own."""
SUM_TIMEOUT_S = 30.0
"""Seconds to wait for other ranks; below the time after which an engine counts as hung."""
SPINS, SHARED_CORE_SPINS = 2000, 20
"""Polls of a turn before the core is yielded: 140 us, or 1.4 us where ranks share a core."""
MAX_CACHED_VIEWS = 256
"""Shapes of operations whose views are cached."""
Views = tuple[Sequence[Tensor], Sequence[Tensor]]
PAUSE_S = 20e-6
"""Least pause that yields the core, some 70 us on Linux; a pause of 0 yields to nothing."""


def memory_bytes(size: int, *, logits: bool = False) -> int:
    """Return the bytes that `size` ranks share, with or without a place for logits."""
    return size * (CACHE_LINE_BYTES + 2 * PLACE_BYTES) + (LOGITS_BYTES if logits else 0)


class SharedGroup:
    """Rank `rank` of `size`, over the file at `path`; `parent` must stay alive."""

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        parent: int = 0,
        timeout_s: float = SUM_TIMEOUT_S,
        num_computing: int = 0,
    ) -> None:
        """`num_computing` is the number of ranks that compute at the same time, if more than
        `size`; a rank polls less where these share cores."""
        self.rank, self.size, self.parent, self.timeout_s = rank, size, parent, timeout_s
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._turns = memoryview(self._memory)[: size * CACHE_LINE_BYTES].cast("q")
        self._own_at = rank * CACHE_LINE_BYTES // self._turns.itemsize
        lines = range(0, len(self._turns), CACHE_LINE_BYTES // self._turns.itemsize)
        self._others_at = [at for at in lines if at != self._own_at]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8, offset=size * CACHE_LINE_BYTES)
        places, self._logits = whole.tensor_split([size * 2 * PLACE_BYTES])
        self._places = places.view(2, size, PLACE_BYTES)
        self._turn, self._clock = 0, SystemClock()
        self._views: dict[tuple[object, ...], Views] = {}
        """(place, shapes) → views of this rank's parts and of all ranks' parts."""
        cores = len(os.sched_getaffinity(0))
        self._spins = SPINS if max(size, num_computing) <= cores else SHARED_CORE_SPINS

    def sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        first = parts_TH[0]
        rows = PLACE_BYTES // (len(parts_TH) * first.shape[1] * first.element_size())
        if len(first) <= rows:
            return self._sum(parts_TH)
        pieces = zip(*(part.split(rows) for part in parts_TH), strict=True)
        return torch.cat([self._sum(piece) for piece in pieces])

    def broadcast(self, x_TH: Tensor) -> Tensor:
        rows = PLACE_BYTES // (x_TH.shape[1] * x_TH.element_size())
        return torch.cat([self._broadcast(piece) for piece in x_TH.split(rows)])

    def concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        width = sum(sizes)
        pieces = own_RP.split(self._logits.nbytes // (width * own_RP.element_size()))
        if len(pieces) == 1:
            return self._concat_columns(own_RP, sizes)
        result = []
        for piece in pieces:
            result.append(self._concat_columns(piece, sizes).clone())
            self._synchronize()  # all have read it
        return torch.cat(result)

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        width, dtype = own_RW.shape[1], own_RW.dtype
        most = PLACE_BYTES // (width * own_RW.element_size())
        if max(counts) <= most:
            own, all_rows = self._row_views(tuple(counts), own_RW)
            own[0].copy_(own_RW)
            self._synchronize()
            return torch.cat(list(all_rows))
        whole = torch.empty(sum(counts), width, dtype=dtype)
        each = whole.split(list(counts))
        each[self.rank].copy_(own_RW)
        for begin in range(0, max(counts), most):
            places = self._places[(self._turn + 1) % 2]
            pieces = [one[begin : begin + most] for one in each]
            shared = [
                place[: piece.nbytes].view(dtype).view(piece.shape)
                for place, piece in zip(places, pieces, strict=True)
            ]
            shared[self.rank].copy_(pieces[self.rank])
            self._synchronize()
            for rank, (piece, given) in enumerate(zip(pieces, shared, strict=True)):
                if rank != self.rank:
                    piece.copy_(given)
        return whole

    def leave(self) -> None:
        self._turns[self._own_at] = DEPARTED_TURN

    def _broadcast(self, x_TH: Tensor) -> Tensor:
        place = self._places[(self._turn + 1) % 2, 0, : x_TH.nbytes]
        shared_TH = place.view(x_TH.dtype).view(x_TH.shape)
        if self.rank == 0:
            shared_TH.copy_(x_TH)
        self._synchronize()
        return shared_TH.clone()

    def _concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        """Write and read the place for logits, after a `broadcast` of all ranks."""
        shape = len(own_RP), sum(sizes)
        place = self._logits[: shape[0] * shape[1] * own_RP.element_size()]
        shared_RV = place.view(own_RP.dtype).view(shape)
        shared_RV.split(list(sizes), 1)[self.rank].copy_(own_RP)
        self._synchronize()
        return shared_RV

    def _sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        own, all_parts = self._part_views(len(parts_TH), parts_TH[0])
        for place, part in zip(own, parts_TH, strict=True):
            place.copy_(part)
        self._synchronize()
        return ordered_sum(all_parts)

    def _part_views(self, count: int, like: Tensor) -> Views:
        """Return where the next sum of `count` parts lies, this rank's parts and those of all
        ranks. Cached by shape, because making the views takes longer than adding a row."""
        which = (self._turn + 1) % 2
        key = which, count, like.shape, like.dtype
        views = self._views.get(key)
        if views is None:
            places = self._places[which, :, : count * like.nbytes].view(like.dtype)
            shared = places.view(self.size, count, *like.shape)
            by_rank = [parts.unbind() for parts in shared.unbind()]
            views = by_rank[self.rank], [*chain.from_iterable(by_rank)]
            self._cache_views(key, views)
        return views

    def _row_views(self, counts: tuple[int, ...], like: Tensor) -> Views:
        """Return where the rows of each rank lie, this rank's and those of all ranks."""
        which = (self._turn + 1) % 2
        key = which, counts, like.shape[1:], like.dtype
        views = self._views.get(key)
        if views is None:
            width = like.shape[1]
            each = [
                place[: count * width * like.element_size()].view(like.dtype).view(count, width)
                for place, count in zip(self._places[which], counts, strict=True)
            ]
            views = [each[self.rank]], each
            self._cache_views(key, views)
        return views

    def _cache_views(self, key: tuple[object, ...], views: Views) -> None:
        """Cache the views of an operation, because steps have similar shapes."""
        if len(self._views) >= MAX_CACHED_VIEWS:
            self._views.clear()
        self._views[key] = views

    def _synchronize(self) -> None:
        """Take a turn: return when all ranks have done what comes before it."""
        self._turn += 1
        self._turns[self._own_at] = self._turn
        turns, turn, until_s = self._turns, self._turn, 0.0
        for at in self._others_at:
            spins = self._spins
            while turns[at] < turn:
                spins -= 1
                if spins:
                    continue
                time.sleep(PAUSE_S)
                spins, until_s = self._spins, self._deadline_s(until_s)

    def _deadline_s(self, until_s: float) -> float:
        """Return until when to wait. Raises RankLostError after that, or if a rank left."""
        now_s, turns, turn = self._clock.now_s(), self._turns, self._turn
        until_s = until_s or now_s + self.timeout_s
        late = [at for at in self._others_at if turns[at] < turn]
        is_over = now_s > until_s or any(turns[at] == DEPARTED_TURN for at in late)
        if late and (is_over or (self.parent and os.getppid() != self.parent)):
            ranks = [at * turns.itemsize // CACHE_LINE_BYTES for at in late]
            raise RankLostError(f"Ranks {ranks} did not come to sum {turn}.")
        return until_s
