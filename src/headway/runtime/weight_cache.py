"""A cache of packed weights on disk: a second start neither reads the checkpoint nor rounds it.

The name of a file is a hash of all that its bytes depend on: the content of the checkpoint, type
and format, the compiled kernels and their instruction set. It is used only after its size, its
header and every blob match their SHA-256; any other file is ignored and written again. Files are
private to the user (0600 in a folder of 0700), appear complete by a rename and never change; the
least recently used are removed beyond a limit of bytes. This module needs no torch: a lookup runs
while torch is imported.

Blobs that a step reads completely are read into memory with huge pages, which a mapped file does
not have. The embedding, of which a step reads a few rows, is mapped; without huge pages or room,
all blobs are.

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

from headway.config.resolve import Settings
from headway.core.clock import Clock, SystemClock
from headway.core.errors import HeadwayError
from headway.core.machine import memory
from headway.runtime.checkpoint_files import MALFORMED
from headway.runtime.memory import collapse, gives_huge_pages, zeros
from headway.runtime.native.available import best_instruction_set, compiled_module
from headway.runtime.weight_key import Key, make_private_folder, open_private

log = logging.getLogger(__name__)

MAGIC = b"headway weights 1\n"
START = len(MAGIC) + hashlib.sha256().digest_size + 8
MAX_HEADER_BYTES = 1 << 26
ALIGNMENT = 64
CHUNK_BYTES = 1 << 19
"""Bytes hashed at once: they fit into a core's L2 cache."""
EMBEDDING = "embedding.weight"
SUFFIX, PARTIAL_SUFFIX = ".weights", ".part"
ABANDONED_AFTER_S = 3600.0
"""Age of a partial file from which its writer counts as dead."""
NUM_HASH_THREADS = 4
"""Threads that hash blobs, for SHA-256 releases the GIL; chosen for few cores, not measured."""

Blobs = dict[str, list[memoryview]]
"""Name → its bytes, in parts."""
CachedBlobs = dict[str, memoryview]
"""Name → its bytes in memory or a private mapping of the file."""


def default_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/headway/weights or ~/.cache/headway/weights; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headway" / "weights"
    except RuntimeError:
        return None


class WeightCache:
    """The cache files of one folder, at most `limit_bytes` in total."""

    def __init__(self, folder: Path, limit_bytes: int, clock: Clock | None = None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._clock = clock or SystemClock()

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`."""
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)

    def read(self, key: str, free_bytes: int = 0) -> CachedBlobs | None:
        """Return the verified blobs of `key`, None without a valid file.

        They may take up to `free_bytes` of memory.
        """
        path = self.path(key)
        try:
            with open_private(path) as file:
                blobs = read_blobs(file, key, free_bytes)
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
        """Store `blobs` under `key`; remove the least recently used files to make room."""
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
        """Remove the least recently used files until at most `limit_bytes` remain."""
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
        """Yield (last use, bytes, path) of files, without those removed meanwhile."""
        for path in self.folder.glob("*" + suffix):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                yield status.st_mtime, status.st_size, path

    def check_integrity(self) -> None:
        """Assert that the files are private to the user and within the limit."""
        files = list(self._files(SUFFIX))
        assert sum(size for _, size, _ in files) <= self.limit_bytes
        if self.folder.exists():
            assert stat.S_IMODE(self.folder.stat().st_mode) == 0o700
        for _, _, path in files:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def header_of(key: str, blobs: Blobs) -> tuple[bytes, dict[str, int], int]:
    """Return (the header, the offset of each blob, the bytes of the file)."""
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
    """Return (the offset of each blob, the end of the last), aligned.

    >>> blob_offsets({"a": 65, "b": 0, "c": 1})
    ({'a': 0, 'b': 128, 'c': 128}, 192)
    """
    places, end = {}, 0
    for name, length in lengths.items():
        places[name] = end
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return places, end


def digest_of(parts: list[memoryview]) -> str:
    """Return the SHA-256 of the concatenated parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_blobs(file: Any, key: str, free_bytes: int = 0) -> CachedBlobs | None:
    """Return the blobs of an open file, each compared with its digest; None for another key.

    All but the embedding are read into memory, if they fit into `free_bytes`. Raises ValueError, or
    an error of JSON or arithmetic, for a damaged file.
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
    pages = huge_page_memory(end, free_bytes)
    if pages is not None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads ahead twice as far
    own = {} if pages is None else {n: pages[at : at + len(blobs[n])] for n, at in places.items()}

    def verify(name: str) -> bool:
        begin, size, digest = entries[name]
        if pages is None:
            return bool(digest_of([blobs[name]]) == digest)
        return digest_at(file.fileno(), first + begin, size, own.get(name)) == digest

    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        if not all(pool.map(verify, blobs)):
            raise ValueError("its numbers are damaged")
    if pages is not None:
        collapse(pages)  # pages that were not huge at once
    return blobs | own


def read_header(file: Any) -> tuple[int, dict[str, Any]]:
    """Return (the offset of the blobs, the header). Raises ValueError, or an error of JSON."""
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


def huge_page_memory(num_bytes: int, free_bytes: int) -> memoryview | None:
    """Return memory in huge pages; None without huge pages or room."""
    try:
        if num_bytes > free_bytes:
            why = f"only {max(free_bytes, 0)} bytes of memory are free for them"
        elif not gives_huge_pages():
            why = "the system gives no huge pages"
        else:
            return memoryview(zeros(num_bytes))
    except OSError as error:
        why = str(error)
    log.debug("packed weights of %d bytes stay in their file: %s", num_bytes, why)
    return None


def digest_at(descriptor: int, at: int, size: int, memory: memoryview | None) -> str:
    """Return the SHA-256 of bytes of a file, and read them into `memory` where it is given."""
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
    """A lookup in the cache that runs in a thread while the rest of the program is imported."""

    def __init__(self, cache: WeightCache, key: Key, free_bytes: int = 0) -> None:
        """`free_bytes` limits the memory of the blobs; see `WeightCache.read`."""
        self.instruction_set = key.instruction_set
        self._cache, self._key, self._free_bytes = cache, key, free_bytes
        self._text: str | None = None
        self._blobs: CachedBlobs | None = None
        self._thread = threading.Thread(target=self._search, name="weight cache", daemon=True)
        self._thread.start()

    def _search(self) -> None:
        try:
            self._text = self._key.text(self._cache.folder / "digests")
        except (OSError, HeadwayError):  # loading reports what is wrong with the files
            return
        self._blobs = self._cache.read(self._text, self._free_bytes)

    def result(self) -> CachedBlobs | None:
        """Return the blobs of the cache, or None; waits for the lookup."""
        self._thread.join()
        blobs, self._blobs = self._blobs, None
        return blobs

    def store(self, blobs: Blobs) -> None:
        """Write `blobs` in a thread; the process waits for it at exit."""
        text = self._text
        if text is not None and blobs:
            write = threading.Thread(
                target=self._cache.write, args=(text, blobs), name="weight cache writer"
            )
            write.start()


def look_up_weights(folder: Path, settings: Settings, *, alone: bool = True) -> Lookup | None:
    """Start the lookup of packed weights of `folder` in the cache; torch is not needed.

    An engine that is `alone` loads them into its own memory, if the plan leaves enough free; an
    engine with shared memory copies them from the file.
    """
    cache = default_folder()
    instruction_set, _ = best_instruction_set()
    if settings.parallel.is_cut or not settings.weight_cache_bytes:
        return None
    if cache is None or not instruction_set:
        return None
    kernels = compiled_module()
    key = Key(folder=folder, settings=settings, instruction_set=instruction_set, kernels=kernels)
    sizes = zip(settings.cache.num_blocks, settings.cache.block_bytes, strict=True)
    free_bytes = memory()[1] - sum(count * size for count, size in sizes) if alone else 0
    return Lookup(WeightCache(cache, settings.weight_cache_bytes), key, free_bytes)
