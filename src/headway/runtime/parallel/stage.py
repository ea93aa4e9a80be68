"""A stage of a pipeline: some consecutive layers, whose hidden states go on to the next stage.

Rank 0 is the engine's process, which samples, so it has the last layers and the head; the highest
rank has the embedding and the first layers (GPipe, Huang et al. 2019, without its backward pass):

    rank 1   embedding, layers 0 … 11 ── rows (T, H) ──▶   rank 0   layers 12 … 23, head

In a stage of several ranks, those that share layers have the same rows after its last sum, and
those that share contexts each have their own rows. Each sends them to the rank at its place of the
next stage: rank 2 to rank 0, rank 3 to rank 1.

Nothing is added up between stages, so the numbers are those of one rank. Each stage has a step of
its own (`pipeline.py`); a stage that waits for rows sleeps.
"""

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.config.parallel import bounds
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.shared import SUM_TIMEOUT_S
from headway.runtime.sockets import receive_into

Ends = tuple[socket.socket | None, socket.socket | None]
"""Sockets of a stage: to the stage before, and to the next."""
HEADER = struct.Struct("<?Q")


class StageError(RuntimeError):
    """An earlier stage raised, so this one does too, and the engine retries in halves."""


class Link(Protocol):
    """The connection of a stage to its neighbours; None stands for a step that raised."""

    def send(self, x_TH: Tensor | None) -> None:
        """Send rows to the next stage. Raises RankLostError."""
        ...

    def receive(self, x_TH: Tensor) -> None:
        """Fill `x_TH` with the rows of the stage before. Raises StageError, RankLostError."""
        ...


@dataclass(frozen=True, slots=True)
class Half:
    """A rank's half of every layer: rank 1 has the MLPs, rank 0 all else; see `halves.py`."""

    rank: int
    link: Link

    @property
    def has_mlps(self) -> bool:
        return self.rank == 1

    def has(self, module: str) -> bool:
        """Return whether this rank has `module` of a model: `layers.0.mlp.down`."""
        return (".mlp." in module) == self.has_mlps


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`; `half` where a rank has a half of every layer."""

    index: int = 0
    count: int = 1
    link: Link | None = None
    half: Half | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of the model that the stage has."""
        ends = bounds(num_layers, self.count)
        return range(ends[self.index], ends[self.index + 1])

    def run(
        self, shape: tuple[int, int], dtype: torch.dtype, own: Callable[[Tensor | None], Tensor]
    ) -> Tensor:
        """Return `own` of the rows of the stage before, (T, H), and send it to the next stage."""
        assert self.link is not None
        given_TH = None if self.is_first else torch.empty(shape, dtype=dtype)
        try:
            if given_TH is not None:
                self.link.receive(given_TH)
            out_TH = own(given_TH)
        except RankLostError:
            raise
        except Exception:
            if not self.is_last:
                self.link.send(None)
            raise
        if not self.is_last:
            self.link.send(out_TH)
        return out_TH


class SocketLink:
    """Streams between processes of one machine: a receiver sleeps, and notices at once when a peer
    ends.

    A frame is a header (whether the step succeeded, and the number of bytes), then the bytes.
    """

    def __init__(
        self,
        before: socket.socket | None,
        behind: socket.socket | None,
        timeout_s: float = SUM_TIMEOUT_S,
    ) -> None:
        self._before, self._behind = before, behind
        for end in (before, behind):
            if end is not None:
                end.settimeout(timeout_s)

    def send(self, x_TH: Tensor | None) -> None:
        assert self._behind is not None
        data = b"" if x_TH is None else row_bytes(x_TH)
        try:
            self._behind.sendall(HEADER.pack(x_TH is not None, len(data)))
            self._behind.sendall(data)
        except OSError as error:
            raise RankLostError(f"The next stage is gone, or hangs: {error!r}.") from error

    def receive(self, x_TH: Tensor) -> None:
        header = bytearray(HEADER.size)
        self._receive_into(memoryview(header))
        is_well, length = HEADER.unpack(header)
        if not is_well:
            raise StageError("A stage before this one raised.")
        if length != x_TH.nbytes:
            raise RankLostError(f"The stage before sent {length} bytes of {x_TH.nbytes}.")
        self._receive_into(row_bytes(x_TH))

    def _receive_into(self, data: memoryview) -> None:
        assert self._before is not None
        try:
            receive_into(self._before, data)
        except OSError as error:
            raise RankLostError(f"The stage before is gone, or hangs: {error!r}.") from error


def row_bytes(x_TH: Tensor) -> memoryview:
    """Return the bytes of dense rows."""
    return x_TH.contiguous().view(torch.uint8).numpy().reshape(-1).data
