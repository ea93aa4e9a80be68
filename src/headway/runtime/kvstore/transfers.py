"""KV blocks to and from a disk or another engine, as `core.plan.Transfer` says.

A block's bytes are those of all parts of all layers of its group, layer by layer, whatever a part
holds; so a format, a layout or a scale more needs nothing here. What leaves is gathered in the step
and written by the store's thread. What comes back is read and hashed by the store's threads and
lies beside the KV memory until `take_done` puts it into its blocks, in the thread of the step: a
read that was given up never writes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headway.core.clock import Clock, SystemClock
from headway.core.parcel import address_of
from headway.core.plan import Moved, TierNews, Transfer
from headway.runtime.attention.cache import KVLayer
from headway.runtime.kvstore.disk import DiskStore
from headway.runtime.kvstore.handover import Exports, PeerStore
from headway.runtime.kvstore.reading import Landed
from headway.runtime.kvstore.segment import BlockId

DISK = "disk"
WAIT_S = 0.005
"""How long a step without work waits for a block to land; a newcomer waits no longer than that."""


@dataclass(slots=True)
class Reading:
    """A transfer that is under way, since when, where its bytes go, and whether they have come."""

    transfer: Transfer
    began_s: float
    data: Tensor
    ended_s: float = 0.0
    is_over: bool = False
    has_come: bool = False


class StoreTransfers:
    """Blocks of `layers` from where `start` finds them: it is given a transfer, the blocks, where
    their bytes go, and what to call when they are there."""

    def __init__(
        self,
        layers: list[KVLayer],
        num_groups: int,
        start: Callable[[Transfer, list[BlockId], list[memoryview], Landed], None],
        clock: Clock | None = None,
    ) -> None:
        self._start = start
        self._parts = [
            [part for layer in layers if layer.group == group for part in layer.parts]
            for group in range(num_groups)
        ]
        self.block_bytes = [sum(part[0].nbytes for part in parts) for parts in self._parts]
        self._clock = clock or SystemClock()
        self._readings: dict[int, Reading] = {}
        self._landed = threading.Condition()
        self._moved: list[Moved] = []

    def gather(self, transfer: Transfer) -> Tensor:
        """The bytes of its blocks, (blocks, bytes of a block)."""
        index = torch.tensor(transfer.blocks)
        parts = [
            part.index_select(0, index.to(part.device)).flatten(1).view(torch.uint8).cpu()
            for part in self._parts[transfer.group]
        ]
        return torch.cat(parts, 1)

    def begin(self, transfer: Transfer) -> None:
        """Start to read its blocks, unless that is under way."""
        if self.is_under_way(transfer):
            return
        shape = (len(transfer.blocks), self.block_bytes[transfer.group])
        data = torch.empty(shape, dtype=torch.uint8)
        reading = Reading(transfer, self._clock.now_s(), data)
        self._readings[transfer.transfer_id] = reading
        blocks = [(transfer.group, key) for key in transfer.keys]
        into = [memoryview(block) for block in data.numpy()]
        self._start(transfer, blocks, into, partial(self._land, reading))

    def is_under_way(self, transfer: Transfer) -> bool:
        """Whether it was begun, and has not been told to be over."""
        return transfer.transfer_id in self._readings

    def _land(self, reading: Reading, has_come: bool) -> None:
        """In a reader's thread."""
        with self._landed:
            reading.has_come, reading.is_over = has_come, True
            reading.ended_s = self._clock.now_s()
            self._landed.notify()

    def take_done(self, *, wait: bool) -> tuple[list[int], list[int], list[Moved]]:
        """(ids of those whose blocks are in place, of those that brought nothing, what was moved).

        With `wait`, and where any is under way, not before one has landed or 5 ms have passed.
        """
        if not self._readings:
            moved, self._moved = self._moved, []
            return [], [], moved
        with self._landed:
            if wait and not any(reading.is_over for reading in self._readings.values()):
                self._landed.wait(WAIT_S)
            now_s = self._clock.now_s()
            over = [r for r in self._readings.values() if r.is_over or is_late(r, now_s)]
        done: list[int] = []
        failed: list[int] = []
        for reading in over:
            transfer = reading.transfer
            del self._readings[transfer.transfer_id]
            asked = len(transfer.blocks) * self.block_bytes[transfer.group]
            came = reading.has_come
            if came:
                self._scatter(transfer, reading.data)
            (done if came else failed).append(transfer.transfer_id)
            seconds = (reading.ended_s if reading.is_over else now_s) - reading.began_s
            self._moved.append(Moved(transfer.peer, "in", asked, asked if came else 0, seconds))
        moved, self._moved = self._moved, []
        return done, failed, moved

    def _scatter(self, transfer: Transfer, bytes_BN: Tensor) -> None:
        """Put the bytes of all blocks into their places."""
        index, at = torch.tensor(transfer.blocks), 0
        for part in self._parts[transfer.group]:
            end = at + part[0].nbytes
            own = bytes_BN[:, at:end].contiguous().view(part.dtype).view(-1, *part.shape[1:])
            part.index_copy_(0, index.to(part.device), own.to(part.device))
            at = end


class DiskTransfers(StoreTransfers):
    """Blocks of `layers` to and from `store`."""

    def __init__(
        self, layers: list[KVLayer], num_groups: int, store: DiskStore, clock: Clock | None = None
    ) -> None:
        super().__init__(layers, num_groups, lambda _, *read: self.store.read(*read), clock)
        self.store = store

    def keep(self, transfer: Transfer) -> None:
        """Hand its blocks to the store, as they are now."""
        began_s = self._clock.now_s()
        data = self.gather(transfer).numpy()
        for key, owner, block in zip(transfer.keys, transfer.owners, data, strict=True):
            self.store.put((transfer.group, key), owner, memoryview(block))
        num_bytes = data.nbytes
        self._moved.append(Moved(DISK, "out", num_bytes, num_bytes, self._clock.now_s() - began_s))

    def take_news(self) -> TierNews | None:
        """What the store has told since, or None."""
        news = self.store.take_news()
        if not (news.kept or news.lost or news.num_bad):
            return None
        return TierNews(news.kept, news.lost, news.num_bad)


class PeerTransfers(StoreTransfers):
    """Blocks of `layers` to `exports`, where other engines fetch them, and from others' by
    `store`."""

    def __init__(
        self, layers: list[KVLayer], num_groups: int, store: PeerStore, exports: Exports
    ) -> None:
        super().__init__(layers, num_groups, lambda t, *read: self.store.read(t.peer, *read))
        self.store, self.exports = store, exports

    def begin_all(self, transfers: list[Transfer]) -> None:
        """Start to pull those that are not under way; a parcel is released behind its last."""
        new = [transfer for transfer in transfers if not self.is_under_way(transfer)]
        for transfer in new:
            self.store.expect(transfer.peer)
        for transfer in new:
            self.begin(transfer)

    def keep(self, transfer: Transfer) -> None:
        """Let others fetch its blocks as they are now."""
        _, parcel_id = address_of(transfer.peer)
        data = self.gather(transfer).numpy()
        for key, owner, block in zip(transfer.keys, transfer.owners, data, strict=True):
            self.exports.put(parcel_id, (transfer.group, key), owner, memoryview(block))


def is_late(reading: Reading, now_s: float) -> bool:
    """Whether it did not come in time; without a limit it is waited for."""
    limit_s = reading.transfer.limit_s
    return limit_s > 0 and now_s - reading.began_s > limit_s
