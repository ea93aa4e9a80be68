"""Memory in which an engine offers KV blocks to other engines of the same machine, which map it.

It is a file without a name (memfd). Its descriptor goes over the Unix socket to engines that have
proved that they may read, and the file is gone when the last process that holds it ends. In front
of the bytes of each block is a stamp, the parcel id and a number that is used once:

    stamp, 24 bytes | padding to 64 | the bytes of the block | padding to a multiple of 64

The owner clears the stamp of a place before it writes another block there. A reader first copies
the bytes and then compares the stamp, so it never takes a block that was overwritten meanwhile.
"""

import mmap
import os
import struct
from typing import NamedTuple

STAMP = struct.Struct("<16sQ")
CACHE_LINE_BYTES = 64
EMPTY_STAMP = bytes(STAMP.size)


class ArenaPlace(NamedTuple):
    """The place of a block: its stamp is at `offset` and contains `number`."""

    offset: int
    length: int
    number: int


class Arena:
    """At most `limit_bytes` of memory, of which only what is used takes pages.

    `handle` is the file's descriptor, None where the system has no memfd; then no other process can
    map it. A free place is used again for blocks of the same size.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.handle = os.memfd_create("headway-kv") if hasattr(os, "memfd_create") else None
        size = max(limit_bytes, mmap.PAGESIZE)
        if self.handle is not None:
            os.ftruncate(self.handle, size)
        self._bytes = memoryview(mmap.mmap(-1 if self.handle is None else self.handle, size))
        self._end = self._number = 0
        self._free: dict[int, list[int]] = {}

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._bytes)

    def put(self, parcel_id: bytes, data: memoryview) -> ArenaPlace | None:
        """Copy a block into a place of its own; return None where there is no room."""
        size = bytes_needed(len(data))
        free = self._free.get(size)
        if free:
            offset = free.pop()
        elif self._end + size <= self.limit_bytes:
            offset, self._end = self._end, self._end + size
        else:
            return None
        self._number += 1
        place = ArenaPlace(offset, len(data), self._number)
        self.view(place)[:] = data
        self._bytes[offset : offset + STAMP.size] = STAMP.pack(parcel_id, self._number)
        return place

    def view(self, place: ArenaPlace) -> memoryview:
        """Return the bytes of a block."""
        return self._bytes[
            place.offset + CACHE_LINE_BYTES : place.offset + CACHE_LINE_BYTES + place.length
        ]

    def free(self, place: ArenaPlace) -> None:
        """Allow the place to be used for another block."""
        self._bytes[place.offset : place.offset + STAMP.size] = EMPTY_STAMP
        self._free.setdefault(bytes_needed(place.length), []).append(place.offset)

    def close(self) -> None:
        """Close the file; processes that have mapped it keep their mapping."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class MappedArena:
    """Another engine's arena, mapped read-only."""

    def __init__(self, handle: int, size: int) -> None:
        """Map the file and close the descriptor. Raises OSError, ValueError."""
        try:
            if os.fstat(handle).st_size < size:
                raise ValueError("the memory is smaller than announced")
            self._bytes = memoryview(mmap.mmap(handle, size, prot=mmap.PROT_READ))
        finally:
            os.close(handle)

    def take(self, parcel_id: bytes, place: ArenaPlace, into: memoryview) -> None:
        """Copy a block into `into`. Raises ValueError where the block is not there any more."""
        offset, length, number = place
        if length != len(into):
            raise ValueError(f"a block has {length} bytes in place of {len(into)}")
        if not 0 <= offset <= len(self._bytes) - CACHE_LINE_BYTES - length:
            raise ValueError("a block lies outside of the memory")
        into[:] = self._bytes[offset + CACHE_LINE_BYTES : offset + CACHE_LINE_BYTES + length]
        if self._bytes[offset : offset + STAMP.size] != STAMP.pack(parcel_id, number):
            raise ValueError("a block was overwritten by another")


def bytes_needed(length: int) -> int:
    """Return the bytes that a block of `length` bytes takes with its stamp: 100 → 192."""
    return CACHE_LINE_BYTES + -(-length // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
