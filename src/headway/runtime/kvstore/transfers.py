"""KV blocks to and from a disk or another engine, as `core.plan.Transfer` defines.

The bytes of a block are those of all parts of all layers of its group, layer by layer; so a new
format, layout or scale needs no change here. Outgoing blocks are gathered in the step and written
by the store's thread. Incoming blocks are read and verified by the store's threads into staging
memory; `take_done` copies them into their blocks in the thread of the step, so a read that was
given up never writes to the KV memory.
"""

import math
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
from headway.runtime.kvstore.segment import BlockId, OnRead

DISK = "disk"
MIN_BLOCKS_PER_RUN = 4
"""Mean length of runs of neighbouring blocks from which on whole runs are copied."""
MAX_IDLE_STAGING_BYTES = 128 * 2**20
"""Staging memory that is kept while unused: 10,000 tokens of Qwen2.5-0.5B in bf16."""
MAX_READ_WAIT_S = 0.005
"""Seconds that a step without work waits for a read; a new request waits no longer than that."""


@dataclass(slots=True)
class ActiveRead:
    """A transfer in progress: its start, where its bytes go, and whether they have arrived."""

    transfer: Transfer
    began_s: float
    data: Tensor
    """(blocks, bytes of a block), a view of `buffer`."""
    buffer: Tensor
    ended_s: float = 0.0
    is_over: bool = False
    has_data: bool = False


class StagingPool:
    """Reused memory: 50 MB of new pages take 40 ms, copying them takes 5 ms."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_STAGING_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._buffers: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return at least `num_bytes` bytes, not initialized."""
        fitting = [at for at, buffer in enumerate(self._buffers) if len(buffer) >= num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers.pop(min(fitting, key=lambda at: len(self._buffers[at])))

    def give(self, buffer: Tensor) -> None:
        """Take back memory without a writer; free the smallest beyond the limit."""
        self._buffers = sorted([*self._buffers, buffer], key=len)
        while sum(map(len, self._buffers)) > self._max_idle_bytes:
            self._buffers.pop(0)


class StoreTransfers:
    """Blocks of `layers` from a store. `start` begins a read: it gets the transfer, the blocks, the
    memory for their bytes, and the function to call at the end."""

    def __init__(
        self,
        layers: list[KVLayer],
        num_groups: int,
        start: Callable[[Transfer, list[BlockId], list[memoryview], OnRead], None],
        clock: Clock | None = None,
    ) -> None:
        self._start = start
        self._parts = [
            [part for layer in layers if layer.group == group for part in layer.parts]
            for group in range(num_groups)
        ]
        self.block_bytes = [sum(part[0].nbytes for part in parts) for parts in self._parts]
        self._clock = clock or SystemClock()
        self._reads: dict[int, ActiveRead] = {}
        self._staging = StagingPool()
        self._read_ended = threading.Condition()
        self._moved: list[Moved] = []

    def gather(self, transfer: Transfer) -> Tensor:
        """Return the bytes of the transfer's blocks, (blocks, bytes of a block)."""
        index = torch.tensor(transfer.blocks)
        parts = [
            part.index_select(0, index.to(part.device)).flatten(1).view(torch.uint8).cpu()
            for part in self._parts[transfer.group]
        ]
        return torch.cat(parts, 1)

    def begin(self, transfer: Transfer) -> None:
        """Start to read the transfer's blocks, unless it is in progress."""
        if self.is_under_way(transfer):
            return
        shape = (len(transfer.blocks), self.block_bytes[transfer.group])
        buffer = self._staging.take(math.prod(shape))
        data = buffer[: math.prod(shape)].view(shape)
        read = ActiveRead(transfer, self._clock.now_s(), data, buffer)
        self._reads[transfer.transfer_id] = read
        blocks = [(transfer.group, key) for key in transfer.keys]
        into = [memoryview(block) for block in data.numpy()]
        self._start(transfer, blocks, into, partial(self._finish_read, read))

    def is_under_way(self, transfer: Transfer) -> bool:
        """Return whether the transfer was started and not yet reported as over."""
        return transfer.transfer_id in self._reads

    def _finish_read(self, read: ActiveRead, has_data: bool) -> None:
        """Note the end of a read, in a reading thread."""
        with self._read_ended:
            read.has_data, read.is_over = has_data, True
            read.ended_s = self._clock.now_s()
            self._read_ended.notify()

    def take_done(self, *, wait: bool) -> tuple[list[int], list[int], list[Moved]]:
        """Return (ids of transfers whose blocks are in place, ids of those that failed, bytes
        moved).

        With `wait`, and while any is in progress, return after one has ended or 5 ms have passed.
        """
        if not self._reads:
            moved, self._moved = self._moved, []
            return [], [], moved
        with self._read_ended:
            if wait and not any(read.is_over for read in self._reads.values()):
                self._read_ended.wait(MAX_READ_WAIT_S)
            now_s = self._clock.now_s()
            over = [r for r in self._reads.values() if r.is_over or is_late(r, now_s)]
        done: list[int] = []
        failed: list[int] = []
        for read in over:
            transfer = read.transfer
            del self._reads[transfer.transfer_id]
            num_bytes = len(transfer.blocks) * self.block_bytes[transfer.group]
            has_data = read.has_data
            if has_data:
                self._scatter(transfer, read.data)
            if read.is_over:  # otherwise its reader may still write
                self._staging.give(read.buffer)
            (done if has_data else failed).append(transfer.transfer_id)
            seconds = (read.ended_s if read.is_over else now_s) - read.began_s
            self._moved.append(
                Moved(transfer.peer, "in", num_bytes, num_bytes if has_data else 0, seconds)
            )
        moved, self._moved = self._moved, []
        return done, failed, moved

    def _scatter(self, transfer: Transfer, bytes_BN: Tensor) -> None:
        """Copy the bytes of all blocks into the KV memory, runs of neighbours at once."""
        blocks, at = transfer.blocks, 0
        spans = runs(blocks, list(range(len(blocks))))
        index = torch.tensor(blocks)
        for part in self._parts[transfer.group]:
            end = at + part[0].nbytes
            bytes_of_part = bytes_BN[:, at:end]
            if (at | bytes_BN.shape[1]) % part.itemsize:
                bytes_of_part = bytes_of_part.contiguous()
            own = bytes_of_part.view(part.dtype).view(-1, *part.shape[1:]).to(part.device)
            if MIN_BLOCKS_PER_RUN * len(spans) > len(blocks):
                part.index_copy_(0, index.to(part.device), own)
            else:
                for block, first, count in spans:
                    part[block : block + count].copy_(own[first : first + count])
            at = end


def runs(blocks: list[int], host_blocks: list[int]) -> list[tuple[int, int, int]]:
    """Return (block, host block, count) of runs that are consecutive on both sides.

    >>> runs([5, 6, 9], [0, 1, 2])
    [(5, 0, 2), (9, 2, 1)]
    """
    spans: list[tuple[int, int, int]] = []
    for block, host in zip(blocks, host_blocks, strict=True):
        if spans:
            first, first_host, count = spans[-1]
            if (block, host) == (first + count, first_host + count):
                spans[-1] = (first, first_host, count + 1)
                continue
        spans.append((block, host, 1))
    return spans


class DiskTransfers(StoreTransfers):
    """Blocks of `layers` to and from `store`."""

    def __init__(
        self, layers: list[KVLayer], num_groups: int, store: DiskStore, clock: Clock | None = None
    ) -> None:
        super().__init__(layers, num_groups, lambda _, *read: self.store.read(*read), clock)
        self.store = store

    def keep(self, transfer: Transfer) -> None:
        """Give the current bytes of the transfer's blocks to the store."""
        began_s = self._clock.now_s()
        data = self.gather(transfer).numpy()
        for key, owner, block in zip(transfer.keys, transfer.owners, data, strict=True):
            self.store.put((transfer.group, key), owner, memoryview(block))
        num_bytes = data.nbytes
        self._moved.append(Moved(DISK, "out", num_bytes, num_bytes, self._clock.now_s() - began_s))

    def take_news(self) -> TierNews | None:
        """Return the store's changes since the last call, None without any."""
        news = self.store.take_news()
        return news if news.stored or news.lost or news.num_bad else None


class PeerTransfers(StoreTransfers):
    """Blocks of `layers` to `exports` for other engines, and from them by `store`."""

    def __init__(
        self, layers: list[KVLayer], num_groups: int, store: PeerStore, exports: Exports
    ) -> None:
        super().__init__(layers, num_groups, lambda t, *read: self.store.read(t.peer, *read))
        self.store, self.exports = store, exports

    def begin_all(self, transfers: list[Transfer]) -> None:
        """Start to pull new transfers; a parcel is released after its last one."""
        new = [transfer for transfer in transfers if not self.is_under_way(transfer)]
        for transfer in new:
            self.store.expect(transfer.peer)
        for transfer in new:
            self.begin(transfer)

    def keep(self, transfer: Transfer) -> None:
        """Let other engines fetch the current bytes of the transfer's blocks."""
        _, parcel_id = address_of(transfer.peer)
        data = self.gather(transfer).numpy()
        for key, owner, block in zip(transfer.keys, transfer.owners, data, strict=True):
            self.exports.put(parcel_id, (transfer.group, key), owner, memoryview(block))


def is_late(read: ActiveRead, now_s: float) -> bool:
    """Return whether a read has exceeded its time limit; without a limit it never does."""
    limit_s = read.transfer.limit_s
    return limit_s > 0 and now_s - read.began_s > limit_s
