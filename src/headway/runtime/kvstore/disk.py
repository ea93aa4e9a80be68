"""KV blocks on disk: segments in a folder of one fingerprint, bounded and checked.

    <root>/<fingerprint>/lock            held while a server uses the folder
    <root>/<fingerprint>/00000007.kv     a segment (`segment.py`)

A low-priority thread writes the blocks, other threads read them; no call here waits for the disk.
`take_news` reports which blocks were found at the start, written or lost. When the bound is
reached, the segment of least value is removed as a whole; its blocks that were read since they were
written are moved to the newest segment, once. Every block is verified by its hash, so after any
fault of the disk a block is at worst computed again.

The value of a segment is LFU with dynamic aging, as in `engine/kv/eviction.py`: the eviction floor
when it was last read plus its reads per block. The floor is the value of the segment that was
evicted last.
"""

import contextlib
import fcntl
import logging
import os
import queue
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headway.core.clock import Clock, SystemClock
from headway.core.plan import TierNews
from headway.runtime.kvstore.segment import (
    ERASED,
    HEADER_BYTES,
    REWRITTEN,
    BlockId,
    OnRead,
    Record,
    Segment,
)
from headway.runtime.weight_key import make_private_folder

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
MIN_SEGMENTS, MAX_SEGMENTS = 8, 256
"""Segments (open files) of a full folder; with a bound above 16 GiB they are longer."""
MAX_PENDING_BYTES = 256 * 2**20
"""Most bytes that wait to be written; blocks beyond it are not stored."""
READERS = 2
WRITE_BACKOFF_S = 30.0
"""Seconds without writes after a disk error."""
MAX_START_WAIT_S = 2.0
"""Seconds that a start waits for the headers; the rest are read beside the first requests."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds that `close` waits for each thread; blocks that are not written by then are lost."""
NICENESS = 10
"""Niceness of the writing thread, so that computation comes first."""
SUFFIX, LOCK = ".kv", "lock"


class InUseError(OSError):
    """Another server uses the folder."""


@dataclass(slots=True)
class DiskBlock:
    """The place of a block on disk, and how often it was read since it was written."""

    segment: Segment
    record: Record
    num_reads: int = 0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A block that waits to be written."""

    block: BlockId
    owner: bytes
    data: memoryview


@dataclass(frozen=True, slots=True)
class EraseJob:
    """Erase the blocks of this owner; a prefix means all owners that begin with it."""

    owner: bytes


class SharedRead:
    """A read whose parts end in several threads; `on_read` is called once, by the last of them."""

    def __init__(self, on_read: OnRead) -> None:
        self._on_read, self._mutex = on_read, threading.Lock()
        self.num_pending, self.has_failed = 0, False

    def finish_part(self, *, well: bool) -> None:
        """Note the end of one part, and report when it was the last."""
        with self._mutex:
            self.num_pending -= 1
            self.has_failed = self.has_failed or not well
            is_last = not self.num_pending
        if is_last:
            self._on_read(not self.has_failed)


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The blocks of a read that one thread copies, and where their bytes go."""

    read: SharedRead
    blocks: list[BlockId]
    into: list[memoryview]


class DiskStore:
    """The segments of `fingerprint` in `root`; all fingerprints have `limit_bytes` at most."""

    def __init__(
        self,
        root: Path,
        fingerprint: bytes,
        limit_bytes: int,
        clock: Clock | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Lock and open the folder. Raises InUseError if it is locked, else OSError."""
        self.root, self.folder = root, root / fingerprint.hex()[:32]
        self.fingerprint, self.limit_bytes = fingerprint, limit_bytes
        most = max(limit_bytes // MIN_SEGMENTS, 1)
        self.segment_bytes = max(min(segment_bytes, most), limit_bytes // MAX_SEGMENTS)
        self._clock = clock or SystemClock()
        make_private_folder(root)
        make_private_folder(self.folder)
        self._lock_handle = take_lock(self.folder / LOCK)
        self._mutex = threading.Lock()
        self._blocks: dict[BlockId, DiskBlock] = {}
        self._pending: dict[BlockId, WriteJob] = {}
        self._pending_bytes = 0
        self._news = TierNews()
        self._segments: list[Segment] = []
        self._newest: Segment | None = None
        self._next_number, self._eviction_floor = 1, 0.0
        self._backoff_until_s = 0.0
        self._has_warned = False
        self._is_closed = False
        self._writes: queue.SimpleQueue[WriteJob | EraseJob | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._reads: queue.SimpleQueue[ReadPart | None] = queue.SimpleQueue()
        try:
            self._remove_other_folders()
            old = self._open_all()
        except OSError:
            os.close(self._lock_handle)
            raise
        writer = threading.Thread(target=self._write_loop, args=(old,), daemon=True)
        writer.start()
        readers = [threading.Thread(target=self._read_loop, daemon=True) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        self._threads = [writer, *readers]
        self.flush(MAX_START_WAIT_S)

    # ── at the start ────────────────────────────────────────────────────────────────────────

    def _remove_other_folders(self) -> None:
        """Remove unused folders of other fingerprints, oldest first, to fit the bound."""
        others = [
            path
            for path in self.root.iterdir()
            if re.fullmatch("[0-9a-f]{32}", path.name) and path != self.folder and path.is_dir()
        ]
        others.sort(key=lambda path: path.stat().st_mtime)
        sizes = {
            path: sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            for path in [*others, self.folder]
        }
        while others and sum(sizes.values()) > self.limit_bytes:
            oldest = others.pop(0)
            with contextlib.suppress(OSError):
                handle = take_lock(oldest / LOCK)
                shutil.rmtree(oldest, ignore_errors=True)
                os.close(handle)
                del sizes[oldest]
        self._other_bytes = sum(size for path, size in sizes.items() if path != self.folder)

    def _open_all(self) -> list[Segment]:
        segments = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            number = int(path.stem) if re.fullmatch("[0-9]{8,12}", path.stem) else -1
            self._next_number = max(self._next_number, number + 1)
            try:
                segment = Segment.open(path, number, self.fingerprint) if number >= 0 else None
                if segment is None:
                    log.warning("%s is not a segment of this model and is removed", path)
                    path.unlink(missing_ok=True)
                else:
                    segments.append(segment)
            except OSError as error:
                log.warning("%s cannot be opened and is ignored: %s.", path, error.strerror)
        return segments

    def _scan(self, segments: list[Segment]) -> None:
        """Register the blocks of the segments, from the newest to the oldest."""
        for segment in reversed(segments):
            before = segment.size
            try:
                records = [record for record in segment.scan() if not record.flags & ERASED]
            except OSError as error:
                self._handle_error(error)
                continue
            with self._mutex:
                self._segments.insert(0, segment)
                self._news.num_bad += segment.size != before
                new = [record for record in records if record.block not in self._blocks]
                self._blocks |= {record.block: DiskBlock(segment, record) for record in new}
                segment.num_live = len(new)
                self._news.stored.extend(record.block for record in new)

    # ── what a step calls: nothing here waits for the disk ──────────────────────────────────

    def put(self, block: BlockId, owner: bytes, data: memoryview) -> None:
        """Store a block's bytes, which must not change; `take_news` reports a failure."""
        with self._mutex:
            is_full = self._pending_bytes + len(data) > MAX_PENDING_BYTES
            if is_full or self._is_closed or self._clock.now_s() < self._backoff_until_s:
                self._news.lost.append(block)
                return
            if block in self._pending or block in self._blocks:
                return
            write = WriteJob(block, owner, data)
            self._pending[block] = write
            self._pending_bytes += len(data)
        self._writes.put(write)

    def read(self, blocks: list[BlockId], into: list[memoryview], on_read: OnRead) -> None:
        """Copy the bytes of each block into its memory and call `on_read`, with False where a block
        is missing, damaged or of another length."""
        read = SharedRead(on_read)
        parts = [ReadPart(read, blocks[at::READERS], into[at::READERS]) for at in range(READERS)]
        parts = [part for part in parts if part.blocks]
        read.num_pending = len(parts)
        for part in parts:
            self._reads.put(part)

    def forget(self, owner: bytes) -> None:
        """Erase the blocks of `owner`, in the writing thread."""
        self._writes.put(EraseJob(owner))

    def take_news(self) -> TierNews:
        """Return the changes since the last call."""
        with self._mutex:
            news, self._news = self._news, TierNews()
        return news

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        with self._mutex:
            return sum(segment.size for segment in self._segments)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all pending blocks are written; return False after `timeout_s`."""
        reached = threading.Event()
        self._writes.put(reached)
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Write the pending blocks and unlock the folder."""
        self._is_closed = True
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=CLOSE_TIMEOUT_S)
        if not any(thread.is_alive() for thread in self._threads):
            for segment in self._segments:
                segment.close()
        os.close(self._lock_handle)

    # ── writing ─────────────────────────────────────────────────────────────────────────────

    def _write_loop(self, old: list[Segment]) -> None:
        self._scan(old)
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._writes.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                if isinstance(job, EraseJob):
                    self._erase(job.owner)
                else:
                    self._write(job)
            except OSError as error:
                self._handle_error(error)
                if isinstance(job, WriteJob):
                    with self._mutex:
                        self._news.lost.append(job.block)
            finally:
                if isinstance(job, WriteJob):
                    with self._mutex:
                        self._pending.pop(job.block, None)
                        self._pending_bytes -= len(job.data)

    def _write(self, job: WriteJob) -> None:
        if self._clock.now_s() < self._backoff_until_s:
            with self._mutex:
                self._news.lost.append(job.block)
            return
        segment = self._segment_with_room(HEADER_BYTES + len(job.data))
        record = segment.append(job.block, job.owner, job.data)
        with self._mutex:
            self._blocks[job.block] = DiskBlock(segment, record)
            segment.num_live += 1

    def _segment_with_room(self, num_bytes: int) -> Segment:
        """Return the segment to append `num_bytes` to; evict others where the bound is reached."""
        newest = self._newest
        if newest is None or newest.size + num_bytes > self.segment_bytes:
            path = self.folder / f"{self._next_number:08d}{SUFFIX}"
            newest = self._newest = Segment.create(path, self._next_number, self.fingerprint)
            newest.value = self._eviction_floor + 1
            self._next_number += 1
            with self._mutex:
                self._segments.append(newest)
        while self._other_bytes + self.num_bytes + num_bytes > self.limit_bytes:
            old = [segment for segment in self._segments if segment is not newest]
            if not old:
                raise OSError("the bound is smaller than a block")
            self._evict(min(old, key=lambda segment: (segment.value, segment.number)), newest)
        return newest

    def _evict(self, segment: Segment, into: Segment) -> None:
        """Remove a segment. Blocks that were read since they were written are moved to `into`,
        once.

        At most half of the segment is moved, so that evictions reach the bound.
        """
        with self._mutex:
            self._eviction_floor = max(self._eviction_floor, segment.value)
            own = [stored for stored in self._blocks.values() if stored.segment is segment]
        moved, bytes_left_to_move = set[BlockId](), segment.size // 2
        for stored in sorted(own, key=lambda stored: -stored.num_reads):
            record = stored.record
            bytes_left_to_move -= HEADER_BYTES + record.length
            should_move = (
                stored.num_reads and not record.flags & REWRITTEN and bytes_left_to_move >= 0
            )
            data = segment.read(record) if should_move else None
            if data is None:
                continue
            copy = into.append(record.block, record.owner, data, REWRITTEN)
            moved.add(record.block)
            with self._mutex:
                self._blocks[record.block] = DiskBlock(into, copy)
                into.num_live += 1
        with self._mutex:
            for stored in own:
                if stored.record.block not in moved:
                    self._blocks.pop(stored.record.block, None)
                    self._news.lost.append(stored.record.block)
        self._unlink(segment)

    def _unlink(self, segment: Segment) -> None:
        if segment is self._newest:
            self._newest = None
        with self._mutex:
            self._segments.remove(segment)
        segment.path.unlink(missing_ok=True)
        segment.close()

    def _erase(self, owner: bytes) -> None:
        """Write zeros over each block of `owner`; remove segments without blocks."""
        with self._mutex:
            own = [p for p in self._blocks.values() if p.record.owner.startswith(owner)]
            for stored in own:
                del self._blocks[stored.record.block]
                self._news.lost.append(stored.record.block)
                stored.segment.num_live -= 1
            touched = {stored.segment.number: stored.segment for stored in own}
        for stored in own:
            if stored.segment.num_live:
                stored.segment.erase(stored.record)
        for segment in touched.values():
            if segment.num_live:
                os.fsync(segment.handle)
            else:
                self._unlink(segment)

    def _handle_error(self, error: OSError) -> None:
        """Log the first error, and suspend writes for WRITE_BACKOFF_S."""
        self._backoff_until_s = self._clock.now_s() + WRITE_BACKOFF_S
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "The KV disk tier in %s does not work: %s. Requests go on without it; free space "
                "there, name another folder with --kv-disk, or leave the option out.",
                self.folder,
                error,
            )

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def _read_loop(self) -> None:
        while (part := self._reads.get()) is not None:
            well = False
            try:
                pairs = zip(part.blocks, part.into, strict=True)
                well = not part.read.has_failed and all(self._read_one(*each) for each in pairs)
            except OSError as error:
                self._handle_error(error)
                self._drop_unreadable(part.blocks)
            part.read.finish_part(well=well)

    def _read_one(self, block: BlockId, into: memoryview) -> bool:
        with self._mutex:
            pending, stored = self._pending.get(block), self._blocks.get(block)
            if pending is None and stored is None:
                self._news.lost.append(block)
            elif stored is not None:
                stored.num_reads += 1
                segment = stored.segment
                segment.value = max(segment.value, self._eviction_floor + 1) + 1 / max(
                    segment.num_live, 1
                )
        if pending is not None and len(pending.data) == len(into):
            into[:] = pending.data
            return True
        if stored is None or stored.record.length != len(into):
            return False
        try:
            is_good = stored.segment.read_into(stored.record, into)
        except OSError:
            with self._mutex:
                is_there = self._blocks.get(block) is stored
            if is_there:
                raise
            return False  # evicted meanwhile
        if not is_good:
            self._drop_damaged(block, stored)
        return is_good

    def _drop_damaged(self, block: BlockId, stored: DiskBlock) -> None:
        """Forget a block with wrong bytes; it is damage unless it was evicted meanwhile."""
        with self._mutex:
            is_bad = self._blocks.get(block) is stored
            if is_bad:
                del self._blocks[block]
                stored.segment.num_live -= 1
                self._news.num_bad += 1
            self._news.lost.append(block)
        if is_bad:
            log.warning("A KV block in %s is damaged: it is computed again.", stored.segment.path)

    def _drop_unreadable(self, blocks: Iterable[BlockId]) -> None:
        with self._mutex:
            self._news.lost += blocks
            for block in blocks:
                self._blocks.pop(block, None)


def take_lock(path: Path) -> int:
    """Return a descriptor that holds a folder's lock. Raises InUseError if it is locked."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise InUseError(f"another server uses {path.parent}") from error
    return handle
