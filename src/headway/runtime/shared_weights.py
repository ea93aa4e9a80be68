"""Weights in memory that the engines of one server share: written by the first, mapped by all.

The server creates an anonymous file in memory (memfd_create) and passes it to its engines. The
first engine that locks it writes the weights as it packs them, and seals the file against further
writes; the other engines wait for the lock and map the sealed file, read-only. The operating system
releases the lock of a process that ends in any way: a file that is unlocked and not sealed is half
written, and the next engine starts again. A process that hangs keeps the lock: an engine that waits
and sees no progress for a timeout loads weights of its own. The file has no name in any folder, and
is freed with the last process that holds it. Needs Linux, and no torch.

    blobs, from multiples of 64 on | index, JSON | its length, 8 bytes
"""

import ctypes
import fcntl
import json
import logging
import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headway.config.resolve import Settings
from headway.core.clock import Clock, SystemClock
from headway.runtime.memory import HUGE_PAGE, collapse
from headway.runtime.native.available import best_instruction_set, compiled_module
from headway.runtime.weight_cache import ALIGNMENT
from headway.runtime.weight_key import Key, text_of_drafter
from headway.spec import ModelSpec

log = logging.getLogger(__name__)

FILE_NAME = "headway weights"
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
LENGTH_FIELD = struct.Struct("<Q")
FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock`: type, whence, start, length, process."""
LOCK_POLL_S = 0.02
MIN_STALL_TIMEOUT_S, SLOW_DISK_BYTES_PER_S = 60.0, 50e6
"""An engine hangs if it packs nothing for the first plus the time to read the files at the second:
it hashes a checkpoint before it packs. Chosen for a slow disk, not measured."""


def create_shared_files(count: int) -> list[int]:
    """Return descriptors of `count` empty files in memory, for `SharedWeights`; [] outside Linux.

    They are private to the user; a child process has them only if they are passed to it.
    """
    if sys.platform != "linux":
        return []
    descriptors = []
    for _ in range(count):
        descriptors.append(os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.fchmod(descriptors[-1], 0o600)
    return descriptors


def filled_bytes(descriptors: Sequence[int]) -> int:
    """Return the bytes of memory that these files take."""
    return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in descriptors)


def stall_timeout_s(num_bytes: int) -> float:
    """Return the seconds that an engine which reads `num_bytes` of files may pack nothing.

    >>> stall_timeout_s(10**9)
    80.0
    """
    return MIN_STALL_TIMEOUT_S + num_bytes / SLOW_DISK_BYTES_PER_S


class StallDetector:
    """Detects that a number has not changed for `longest_s` seconds."""

    def __init__(self, longest_s: float, clock: Clock | None = None) -> None:
        self._longest_s, self._clock = longest_s, clock or SystemClock()
        self._last, self._since_s = -1, self._clock.now_s()

    def is_stalled(self, number: int) -> bool:
        """Return whether the number, now `number`, has been the same for too long."""
        now_s = self._clock.now_s()
        if number != self._last:
            self._last, self._since_s = number, now_s
        return now_s - self._since_s >= self._longest_s


class SharedWeights:
    """One such file for one engine. `key`: equal text, equal bytes.

    Call `enter`. Then read `blobs` if the file `is_whole`; or, if this engine `fills` it, `reserve`
    room, `keep` every blob and `seal` it. Otherwise the engine loads weights of its own. It
    `gave_up` if another engine has packed nothing for `stall_timeout_s`.
    """

    def __init__(
        self, descriptor: int, key: str, stall_timeout_s: float = MIN_STALL_TIMEOUT_S
    ) -> None:
        self._descriptor, self._key, self._stall_timeout_s = descriptor, key, stall_timeout_s
        self._entries: dict[str, tuple[int, int]] = {}
        self._end, self._num_mapped_bytes = 0, 0
        self._address = 0
        self.is_whole = self.fills = self.has_other_key = self.gave_up = False

    def enter(self, *, waits: bool = True) -> None:
        """Map the complete file, or lock it to fill it.

        With `waits`, wait while another engine fills it. `has_other_key` is set for a file with
        weights of another key. Raises OSError.
        """
        if self.is_whole or self.fills or self.has_other_key or self.gave_up:
            return
        if not is_sealed(self._descriptor) and not self._lock(waits):
            return
        if is_sealed(self._descriptor):
            self._unlock()
            self._open()
            return
        os.ftruncate(self._descriptor, 0)  # drops what a dead engine wrote
        self.fills = True

    def leave(self) -> None:
        """Stop filling: empty the file for the next engine that enters."""
        if self.fills:
            self.fills = False
            os.ftruncate(self._descriptor, 0)
            self._unlock()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Map room for blobs of these sizes. Raises OSError."""
        assert self.fills
        self._map(sum(size + ALIGNMENT for size in sizes))

    def keep(self, name: str, parts: Sequence[memoryview]) -> memoryview:
        """Write a blob, in parts; return its bytes in the file. Raises OSError (no memory)."""
        assert self.fills and name not in self._entries
        begin = at = -(-self._end // ALIGNMENT) * ALIGNMENT
        for part in parts:
            at = self._write(part, at)
        assert at <= self._num_mapped_bytes, "more bytes than were reserved"
        self._entries[name], self._end = (begin, at - begin), at
        return self._bytes(begin, at - begin)

    def seal(self) -> None:
        """Complete the file and let the other engines read it. Raises OSError."""
        assert self.fills
        index = json.dumps({"key": self._key, "blobs": self._entries}).encode()
        self._write(memoryview(index + LENGTH_FIELD.pack(len(index))), self._end)
        self._collapse()
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        self.fills, self.is_whole = False, True
        self._unlock()

    @property
    def blobs(self) -> dict[str, memoryview]:
        """Name → its bytes, of a complete file. A write to them ends the process."""
        assert self.is_whole
        return {name: self._bytes(*place) for name, place in self._entries.items()}

    def _lock(self, waits: bool) -> bool:
        """Return whether the lock was taken; with `waits`, wait while its owner makes progress."""
        standstill = StallDetector(self._stall_timeout_s)
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    return False
            else:
                return True
            if standstill.is_stalled(filled_bytes([self._descriptor])):
                self.gave_up = True
                log.warning(
                    "process %d has packed nothing of the weights for %.0f s: this engine has them "
                    "in memory of its own, beside those of the others",
                    lock_owner(self._descriptor),
                    self._stall_timeout_s,
                )
                return False
            time.sleep(LOCK_POLL_S)

    def _unlock(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _open(self) -> None:
        """Map a sealed file, if it has the same key."""
        size = os.fstat(self._descriptor).st_size
        (length,) = LENGTH_FIELD.unpack(
            os.pread(self._descriptor, LENGTH_FIELD.size, size - LENGTH_FIELD.size)
        )
        index = json.loads(os.pread(self._descriptor, length, size - LENGTH_FIELD.size - length))
        if index["key"] != self._key:
            self.has_other_key = True
            return
        self._map(size)
        self._entries = {name: (begin, count) for name, (begin, count) in index["blobs"].items()}
        self.is_whole = True

    def _write(self, data: memoryview, at: int) -> int:
        """Write all of `data`; return its end."""
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written
        return at

    def _map(self, num_bytes: int) -> None:
        """Map bytes of the file, which may still be shorter, at a multiple of 2 MiB.

        The mapping is never removed: weights are read as long as the engine runs.
        """
        self._num_mapped_bytes = num_bytes
        window = _mmap(0, num_bytes + HUGE_PAGE, PROT_NONE, mmap.MAP_ANONYMOUS, -1)
        begin = -(-window // HUGE_PAGE) * HUGE_PAGE
        self._address = _mmap(begin, num_bytes, mmap.PROT_READ, MAP_FIXED, self._descriptor)

    def _bytes(self, begin: int, count: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * count).from_address(self._address + begin)).cast("B")

    def _collapse(self) -> None:
        """Move the blobs into huge pages, which all engines share."""
        collapse(self._bytes(0, self._end))


def is_sealed(descriptor: int) -> bool:
    """Return whether the file is complete."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


def lock_owner(descriptor: int) -> int:
    """Return the process that holds the lock of the file, 0 for none."""
    request = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, process = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    return 0 if kind == fcntl.F_UNLCK else int(process)


def _mmap(address: int, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    """Call mmap(2), private and without reserving memory. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags |= mmap.MAP_PRIVATE | MAP_NORESERVE
    result = call(address or None, max(num_bytes, 1), protection, flags, descriptor, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def share_weights(
    folder: Path, settings: Settings, draft: tuple[Path, ModelSpec] | None, weights: Sequence[int]
) -> list[SharedWeights]:
    """Return the memory of the model's and its drafter's weights that several engines share.

    Without shared memory it is []. The first one is entered if no other engine is filling it.
    """
    if not weights or settings.device != "cpu" or settings.load_format == "dummy":
        return []
    instruction_set, _ = best_instruction_set()
    kernels = compiled_module() if instruction_set else None
    key = Key(folder=folder, settings=settings, instruction_set=instruction_set, kernels=kernels)
    drafter = replace(key, folder=draft[0]).text_of_files() if draft else text_of_drafter(folder)
    texts = key.text_of_files(), drafter
    longest_s = stall_timeout_s(sum(path.stat().st_size for path in key.files))
    shared = [SharedWeights(one, text, longest_s) for one, text in zip(weights, texts, strict=True)]
    shared[0].enter(waits=False)
    return shared
