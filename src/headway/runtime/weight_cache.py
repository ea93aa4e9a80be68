"""Packed weights on disk, so that a second start neither reads the checkpoint nor rounds it.

A file is named by all that its bytes depend on: the content of the checkpoint, type and format, the
compiled kernels and their instruction set. It is believed only after its size, its header and every
blob have been compared with their SHA-256; anything else is ignored and written anew. Files are the
user's alone (0600 in a folder of 0700), appear whole by a rename, never change afterwards, and the
least recently used go when together they are beyond the limit. Nothing here needs torch: a lookup
runs while it is imported.

What a step reads whole is read into memory in huge pages, which those of a file are not. The
embedding, of which a step reads a few rows, is mapped; so is all where there are no huge pages or
no room.

    headway weights 1\\n | SHA-256 of the header | its length, 8 bytes | header, JSON | blobs, from
    multiples of 64 on
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headway.core.clock import Clock, SystemClock
from headway.core.errors import HeadwayError
from headway.runtime.checkpoint_files import MALFORMED
from headway.runtime.memory import collapse, gives_huge_pages, zeros
from headway.runtime.weight_key import Key, make_private_folder, open_private

log = logging.getLogger(__name__)

MAGIC = b"headway weights 1\n"
START = len(MAGIC) + hashlib.sha256().digest_size + 8
MAX_HEADER_BYTES = 1 << 26
ALIGNMENT = 64
CHUNK_BYTES = 1 << 19
"""Bytes that are hashed while a core's second cache has them."""
EMBEDDING = "embedding.weight"
SUFFIX, PARTIAL_SUFFIX = ".weights", ".part"
ABANDONED_AFTER_S = 3600.0
"""A file that a dead writer left unfinished."""
NUM_HASH_THREADS = 4
"""Threads that hash blobs, for SHA-256 releases the GIL; chosen for few cores, not measured."""

Blobs = dict[str, list[memoryview]]
"""Name → its bytes, in parts."""
CachedBlobs = dict[str, memoryview]
"""Name → its bytes in memory or a mapped file; a change of them stays in this process."""


def default_folder() -> Path | None:
    """$XDG_CACHE_HOME/headway/weights, usually ~/.cache/headway/weights; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headway" / "weights"
    except RuntimeError:
        return None


class WeightCache:
    """The files of one folder, at most `limit_bytes` together."""

    def __init__(self, folder: Path, limit_bytes: int, clock: Clock | None = None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._clock = clock or SystemClock()

    def path(self, key: str) -> Path:
        """The file of what `key` describes."""
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)

    def read(self, key: str, room_bytes: int = 0) -> CachedBlobs | None:
        """The blobs stored under `key`, verified; None where there are none to be trusted.

        They may take so much memory of their own.
        """
        path = self.path(key)
        try:
            with open_private(path) as file:
                blobs = read_blobs(file, key, room_bytes)
            if blobs is not None:
                now_s = self._clock.wall_s()
                os.utime(path, (now_s, now_s))
        except FileNotFoundError:
            return None
        except (OSError, *MALFORMED) as error:
            log.warning("packed weights in %s are not used: %s", path, error)
            return None
        return blobs

    def write(self, key: str, blobs: Blobs) -> None:
        """Keep `blobs` under `key`, dropping the least recently used files for their room."""
        header, offsets, num_bytes = header_of(key, blobs)
        if num_bytes > self.limit_bytes:
            log.info("packed weights of %d bytes are beyond the cache's limit", num_bytes)
            return
        try:
            make_private_folder(self.folder)
            self.trim(self.limit_bytes - num_bytes)
            self._write(self.path(key), header, blobs, offsets, num_bytes)
            self.trim(self.limit_bytes)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self.folder, error)

    def _write(
        self, path: Path, header: bytes, blobs: Blobs, offsets: dict[str, int], num_bytes: int
    ) -> None:
        handle, name = tempfile.mkstemp(PARTIAL_SUFFIX, dir=self.folder)  # 0600
        try:
            with open(handle, "wb") as file:
                file.write(header)
                for blob, parts in blobs.items():
                    file.seek(offsets[blob])
                    for part in parts:
                        file.write(part)
                file.truncate(num_bytes)
            now_s = self._clock.wall_s()
            os.utime(name, (now_s, now_s))
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def trim(self, limit_bytes: int) -> None:
        """Remove the least recently used files until at most `limit_bytes` are left."""
        total_bytes = 0
        for _, size, path in sorted(self._files(SUFFIX), reverse=True):
            total_bytes += size
            if total_bytes > limit_bytes:
                path.unlink(missing_ok=True)
                total_bytes -= size
        for used_s, _, path in self._files(PARTIAL_SUFFIX):
            if used_s < self._clock.wall_s() - ABANDONED_AFTER_S:
                path.unlink(missing_ok=True)

    def _files(self, suffix: str) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of files; one that goes away meanwhile is none."""
        for path in self.folder.glob("*" + suffix):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                yield status.st_mtime, status.st_size, path

    def check_integrity(self) -> None:
        """The files are the user's alone and within the limit, and nothing else is there."""
        files = list(self._files(SUFFIX))
        assert sum(size for _, size, _ in files) <= self.limit_bytes
        if self.folder.exists():
            assert stat.S_IMODE(self.folder.stat().st_mode) == 0o700
        for _, _, path in files:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def header_of(key: str, blobs: Blobs) -> tuple[bytes, dict[str, int], int]:
    """(the file's beginning, where each blob lies, bytes of the file)."""
    lengths = {name: sum(part.nbytes for part in parts) for name, parts in blobs.items()}
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        digests = dict(zip(blobs, pool.map(digest_of, blobs.values()), strict=True))
    places, end = blob_offsets(lengths)
    entries = {name: (at, lengths[name], digests[name]) for name, at in places.items()}
    text = json.dumps({"key": key, "bytes": end, "blobs": entries}).encode()
    text += b" " * (-(START + len(text)) % ALIGNMENT)
    first = START + len(text)
    header = MAGIC + hashlib.sha256(text).digest() + struct.pack("<Q", len(text)) + text
    return header, {name: first + at for name, at in places.items()}, first + end


def blob_offsets(lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """(where each blob begins, where the last ends), rounded up.

    >>> blob_offsets({"a": 65, "b": 0, "c": 1})
    ({'a': 0, 'b': 128, 'c': 128}, 192)
    """
    places, end = {}, 0
    for name, length in lengths.items():
        places[name] = end
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return places, end


def digest_of(parts: list[memoryview]) -> str:
    """SHA-256 of the parts one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_blobs(file: Any, key: str, room_bytes: int = 0) -> CachedBlobs | None:
    """The blobs of an open file, each compared with its digest; None for another key's.

    All but the embedding are read into memory, where they fit into `room_bytes` of it. Raises
    ValueError, or what JSON and arithmetic raise, when the file is not what was written.
    """
    first, header = read_header(file)
    num_bytes, entries = first + header["bytes"], header["blobs"]
    if header["key"] != key:
        return None
    if os.fstat(file.fileno()).st_size != num_bytes:
        raise ValueError("it is truncated")
    memory = memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY))
    blobs = {
        name: memory[first + begin : first + begin + size]
        for name, (begin, size, _) in entries.items()
    }
    places, end = blob_offsets(
        {name: len(blob) for name, blob in blobs.items() if name != EMBEDDING}
    )
    room = huge_page_memory(end, room_bytes)
    if room is not None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads ahead twice as far
    own = {} if room is None else {n: room[at : at + len(blobs[n])] for n, at in places.items()}

    def verify(name: str) -> bool:
        begin, size, digest = entries[name]
        if room is None:
            return bool(digest_of([blobs[name]]) == digest)
        return digest_at(file.fileno(), first + begin, size, own.get(name)) == digest

    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        if not all(pool.map(verify, blobs)):
            raise ValueError("its numbers are damaged")
    if room is not None:
        collapse(room)  # what was not to be had in one piece at once
    return blobs | own


def read_header(file: Any) -> tuple[int, dict[str, Any]]:
    """(where the blobs begin, the header); ValueError, or what JSON raises."""
    head = file.read(START)
    if len(head) < START or not head.startswith(MAGIC):
        raise ValueError("it does not begin as packed weights do")
    (length,) = struct.unpack("<Q", head[-8:])
    if length > MAX_HEADER_BYTES:
        raise ValueError("its header claims to be huge")
    text = file.read(length)
    if hashlib.sha256(text).digest() != head[len(MAGIC) : -8]:
        raise ValueError("its header is damaged")
    return START + length, json.loads(text)


def huge_page_memory(num_bytes: int, room_bytes: int) -> memoryview | None:
    """So many bytes in huge pages; None where there are none, or no room."""
    try:
        if num_bytes > room_bytes:
            why = f"of the memory {max(room_bytes, 0)} bytes have no other use"
        elif not gives_huge_pages():
            why = "the system gives no huge pages"
        else:
            return memoryview(zeros(num_bytes))
    except OSError as error:
        why = str(error)
    log.debug("packed weights of %d bytes stay in their file: %s", num_bytes, why)
    return None


def digest_at(descriptor: int, at: int, size: int, memory: memoryview | None) -> str:
    """SHA-256 of so many bytes of a file, which are read into `memory` if it is there."""
    digest, done = hashlib.sha256(), 0
    scratch = memoryview(bytearray(CHUNK_BYTES if memory is None else 0))
    while done < size:
        whole = scratch[: size - done] if memory is None else memory[done : done + CHUNK_BYTES]
        count = os.preadv(descriptor, [whole], at + done)
        if not count:
            raise ValueError("it is truncated")
        digest.update(whole[:count])
        done += count
    return digest.hexdigest()


class Lookup:
    """A search that runs in a thread of its own while the rest of the program is imported."""

    def __init__(self, cache: WeightCache, key: Key, room_bytes: int = 0) -> None:
        """`room_bytes`: of memory for what is blobs, see `WeightCache.read`."""
        self.instruction_set = key.instruction_set
        self._cache, self._key, self._room_bytes = cache, key, room_bytes
        self._text: str | None = None
        self._blobs: CachedBlobs | None = None
        self._thread = threading.Thread(target=self._search, name="weight cache", daemon=True)
        self._thread.start()

    def _search(self) -> None:
        try:
            self._text = self._key.text(self._cache.folder / "digests")
        except (OSError, HeadwayError):  # loading says what is wrong with it
            return
        self._blobs = self._cache.read(self._text, self._room_bytes)

    def result(self) -> CachedBlobs | None:
        """What the cache has, or None; waits for the search."""
        self._thread.join()
        blobs, self._blobs = self._blobs, None
        return blobs

    def store(self, blobs: Blobs) -> None:
        """Write `blobs` in the background; a process that ends waits for it."""
        text = self._text
        if text is not None and blobs:
            write = threading.Thread(
                target=self._cache.write, args=(text, blobs), name="weight cache writer"
            )
            write.start()
