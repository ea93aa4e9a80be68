"""A file of KV blocks, written at its end only: a head, then one record for each block.

    headway kv 1\n | fingerprint, 32 bytes | record | record | …
    record   header of 116 bytes | the bytes of the block

A header has the block's group, length, key and owner, the SHA-256 over all of these and the bytes,
and a CRC-32 over the header itself. So the headers alone tell what a file contains, and a block is
used only after its bytes were hashed. A damaged header ends the file: the records behind it cannot
be found and are cut off. Erased records have zeros for key, owner and bytes.

The fingerprint identifies what the bytes mean; a file with another fingerprint is not read.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headway.core.regular_file import open_handle

MAGIC = b"headway kv 1\n"
HEAD_BYTES = len(MAGIC) + 32
_HEADER = struct.Struct("<4sHHII32s32s32s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
RECORD = b"HWKV"
VERSION = 1
ERASED, REWRITTEN = 1, 2
"""Flags of a record: its bytes are zeros; it has been moved to a newer file once."""
MAX_BLOCK_BYTES = 1 << 30

BlockId = tuple[int, bytes]
"""(KV group, key) of a block."""
OnRead = Callable[[bool], None]
"""Called by a reading thread when all blocks of a read are in place (True) or will not be."""


class Record(NamedTuple):
    """One block of a file: the offset of its header, and the header's content."""

    block: BlockId
    owner: bytes
    offset: int
    length: int
    flags: int
    digest: bytes


def block_digest(block: BlockId, owner: bytes, data: bytes | memoryview) -> bytes:
    """Return the SHA-256 over group, key, owner and bytes."""
    hashed = hashlib.sha256(struct.pack("<H", block[0]) + block[1] + owner)
    hashed.update(data)
    return hashed.digest()


def pack_header(record: Record) -> bytes:
    """Return the header of a record, as it is stored."""
    group, key = record.block
    parts = (record.length, record.flags, key, record.owner, record.digest)
    header = _HEADER.pack(RECORD, VERSION, group, *parts)
    return header + _CRC.pack(zlib.crc32(header))


def parse_header(header: bytes, offset: int) -> Record | None:
    """Return the record of the header that was read at `offset`, None where it is invalid."""
    if len(header) != HEADER_BYTES or _CRC.unpack(header[-4:])[0] != zlib.crc32(header[:-4]):
        return None
    magic, version, group, length, flags, key, owner, digest = _HEADER.unpack(header[:-4])
    if magic != RECORD or version != VERSION or length > MAX_BLOCK_BYTES:
        return None
    return Record((group, key), owner, offset, length, flags, digest)


@dataclass(eq=False, slots=True)
class Segment:
    """An open file of blocks, of `size` bytes; the segment of least `value` is evicted first."""

    number: int
    path: Path
    handle: int
    size: int
    value: float = 0.0
    num_live: int = 0

    @classmethod
    def create(cls, path: Path, number: int, fingerprint: bytes) -> "Segment":
        """Create a file that only this user may read. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            write_all(handle, [MAGIC + fingerprint], 0)
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        return cls(number, path, handle, HEAD_BYTES)

    @classmethod
    def open(cls, path: Path, number: int, fingerprint: bytes) -> "Segment | None":
        """Open a file, None with another fingerprint. Raises OSError, also for no regular file."""
        handle = open_handle(path, os.O_RDWR | os.O_NOFOLLOW)
        if os.pread(handle, HEAD_BYTES, 0) != MAGIC + fingerprint:
            os.close(handle)
            return None
        return cls(number, path, handle, os.fstat(handle).st_size)

    def scan(self) -> Iterator[Record]:
        """Yield records by their headers; cut off a damaged end. Raises OSError."""
        at = HEAD_BYTES
        while at < self.size:
            record = parse_header(os.pread(self.handle, HEADER_BYTES, at), at)
            if record is None or at + HEADER_BYTES + record.length > self.size:
                os.ftruncate(self.handle, at)
                self.size = at
                return
            yield record
            at += HEADER_BYTES + record.length

    def append(
        self, block: BlockId, owner: bytes, data: bytes | memoryview, flags: int = 0
    ) -> Record:
        """Write a block behind the last one. After an OSError the file is as before."""
        digest = block_digest(block, owner, data)
        record = Record(block, owner, self.size, len(data), flags, digest)
        try:
            write_all(self.handle, [pack_header(record), data], self.size)
        except OSError:
            os.ftruncate(self.handle, self.size)
            raise
        self.size += HEADER_BYTES + len(data)
        return record

    def read(self, record: Record) -> memoryview | None:
        """Return the bytes of a block, None where they are not those written. Raises OSError."""
        data = memoryview(bytearray(record.length))
        return data if self.read_into(record, data) else None

    def read_into(self, record: Record, data: memoryview) -> bool:
        """Read a block's bytes into `data`; return whether they are right. Raises OSError."""
        header = bytearray(HEADER_BYTES)
        num_read = os.preadv(self.handle, [header, data], record.offset)
        is_whole = num_read == HEADER_BYTES + record.length
        if not is_whole or parse_header(bytes(header), record.offset) != record:
            return False
        return block_digest(record.block, record.owner, data) == record.digest

    def erase(self, record: Record) -> None:
        """Write zeros over a block, its key and its owner. Raises OSError."""
        none = bytes(32)
        erased = Record((record.block[0], none), none, record.offset, record.length, ERASED, none)
        write_all(self.handle, [pack_header(erased), bytes(record.length)], record.offset)

    def close(self) -> None:
        """Close the file; bytes that were read from it stay valid."""
        os.close(self.handle)


def write_all(handle: int, parts: list[bytes | memoryview], at: int) -> None:
    """Write `parts` one after another from offset `at` on. Raises OSError."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            count = os.pwrite(handle, rest, at)
            rest, at = rest[count:], at + count
