"""Groups of ranks over gloo of torch.distributed, between CPU processes, on the loopback.

Each group is an object of its own instead of torch's default process group, because a process may
have several engines.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from headway.runtime.parallel.group import RankLostError, ordered_sum
from headway.runtime.parallel.shared import SUM_TIMEOUT_S
from headway.runtime.parallel.stage import StageError


class DistributedGroup:
    """Rank `rank` of `size`; the ranks find each other by the file at `path`."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float = SUM_TIMEOUT_S) -> None:
        self.rank, self.size = rank, size
        self._gloo = connect_gloo(path, rank, size, timeout_s)

    def sum(self, parts_TH: Sequence[Tensor]) -> Tensor:
        own = torch.stack(list(parts_TH))
        return ordered_sum(torch.cat(self._all_gather(own)))

    def broadcast(self, x_TH: Tensor) -> Tensor:
        x_TH = x_TH.clone()
        with rank_errors():
            self._gloo.broadcast(x_TH, 0).wait()
        return x_TH

    def concat_columns(self, own_RP: Tensor, sizes: Sequence[int]) -> Tensor:
        own = functional.pad(own_RP, (0, max(sizes) - own_RP.shape[1]))
        pairs = zip(self._all_gather(own), sizes, strict=True)
        return torch.cat([columns[:, :size] for columns, size in pairs], dim=1)

    def concat_rows(self, own_RW: Tensor, counts: Sequence[int]) -> Tensor:
        own = functional.pad(own_RW, (0, 0, 0, max(counts) - len(own_RW)))
        pairs = zip(self._all_gather(own), counts, strict=True)
        return torch.cat([rows[:count] for rows, count in pairs])

    def leave(self) -> None:
        """Do nothing: the other ranks wait until gloo's timeout."""

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with rank_errors():
            self._gloo.allgather(gathered, own).wait()
        return gathered


class DistributedLink:
    """The connection between stages of a pipeline, of which the last is rank 0."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float = SUM_TIMEOUT_S) -> None:
        self.rank = rank
        self._gloo = connect_gloo(path, rank, size, timeout_s)

    def send(self, x_TH: Tensor | None) -> None:
        with rank_errors():
            self._gloo.send([torch.tensor([x_TH is not None])], self.rank - 1, 0).wait()
            if x_TH is not None:
                data = x_TH.contiguous().view(torch.uint8)
                self._gloo.send([data], self.rank - 1, 0).wait()

    def receive(self, x_TH: Tensor) -> None:
        is_well = torch.empty(1, dtype=torch.bool)
        with rank_errors():
            self._gloo.recv([is_well], self.rank + 1, 0).wait()
            if is_well:
                self._gloo.recv([x_TH.view(torch.uint8)], self.rank + 1, 0).wait()
        if not is_well:
            raise StageError("A stage before this one raised.")


def connect_gloo(path: Path, rank: int, size: int, timeout_s: float) -> Any:
    """Return torch's gloo group of these ranks (its type stubs do not have the class)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(path), size)  # type: ignore[attr-defined]
    kind: Any = dist.ProcessGroupGloo
    return kind(store, rank, size, timedelta(seconds=timeout_s))


@contextmanager
def rank_errors() -> Iterator[None]:
    """Raise RankLostError in place of gloo's errors, which mean that a rank did not come."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"A rank did not come: {error}") from error
