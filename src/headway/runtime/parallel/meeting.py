"""The folder, in memory, where the ranks of a model find each other; only this user may read it.

sums-0, sums-1, …     of ranks that compute layers together, rank 0's first: their shared memory, or
                      gloo's file
splits-0, splits-1 …  of ranks that hold parts of contexts, of the same heads and layers: the same
rows-0, rows-1, …     of the stages, for each place in a stage: gloo's file

The process that makes the folder holds a lock on it, which ends with the process. A process that is
killed while its ranks start leaves a folder without a lock, and the next process removes it.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from headway.config.parallel import Parallel
from headway.runtime.parallel.shared import memory_bytes

log = logging.getLogger(__name__)

SHARED_FOLDER = Path("/dev/shm")
PREFIX = "headway-meeting-"
MAX_LOCK_ATTEMPTS = 100
"""Attempts to lock a new folder: another process may remove it before it is locked."""
GLOO_FALLBACK_WARNING = (
    "%s has no room for what %d ranks share (%s): they meet by gloo in %s, which is slower. Give "
    "it more room (a container's --shm-size)."
)
GLOO_BYTES = 64 * 1024
"""Bytes that gloo may write while ranks find each other."""


class Meeting:
    """A new folder for the ranks of `parallel`, with the zeroed files of their shared memory.

    Where memory has no room for these, `parallel` is changed to gloo.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel, temp = parallel, Path(tempfile.gettempdir())
        within = SHARED_FOLDER if SHARED_FOLDER.is_dir() else temp
        try:
            self.folder, self._lock = make_folder(parallel, within)
        except OSError as error:
            log.warning(GLOO_FALLBACK_WARNING, within, parallel.num_ranks, error, temp)
            self.parallel = replace(parallel, transport="gloo")
            self.folder, self._lock = make_folder(self.parallel, temp)

    def end(self) -> None:
        """Remove the folder; memory that ranks have mapped stays valid. May be called twice."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def make_folder(parallel: Parallel, within: Path) -> tuple[Path, int]:
    """Return (a new folder with the shared files, the descriptor that holds its lock).

    Raises OSError, without leaving files, where there is no room.
    """
    sweep(within)
    folder, lock = make_locked_folder(within)
    try:
        allocate_file(folder / "room", GLOO_BYTES)
        (folder / "room").unlink()
        if parallel.transport == "shared":
            for path, size in shared_files(parallel, folder).items():
                allocate_file(path, size)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise
    return folder, lock


def make_locked_folder(within: Path) -> tuple[Path, int]:
    """Return (new folder, descriptor that holds its lock or -1 where locks do not work)."""
    for _ in range(MAX_LOCK_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))
        lock = try_lock(folder, wait=True)
        if lock is not None:
            return folder, lock
        with contextlib.suppress(OSError):
            folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=within)), -1


def try_lock(folder: Path, *, wait: bool = False) -> int | None:
    """Return a descriptor that holds the folder's lock; None if it is locked or gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another process has locked or removed it
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    os.close(lock)
    return None


def sweep(within: Path) -> None:
    """Remove the folders of processes that were killed: those without a lock."""
    for folder in within.glob(f"{PREFIX}*"):
        lock = try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def shared_files(parallel: Parallel, meeting: Path) -> dict[Path, int]:
    """Return the bytes of each file of shared memory. Logits come to rank 0 only."""
    files = {}
    if parallel.size > 1:
        for number in range(parallel.num_ranks // parallel.size):
            files[sums_path(meeting, number)] = memory_bytes(parallel.size, logits=number == 0)
    if parallel.context > 1:
        for number in range(parallel.num_ranks // parallel.context):
            files[splits_path(meeting, number)] = memory_bytes(parallel.context)
    return files


def allocate_file(path: Path, size: int) -> None:
    """Make a file of `size` zeros. Raises OSError where memory has no room for it."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def sums_path(meeting: Path, number: int) -> Path:
    """Return the path where ranks that compute layers together meet."""
    return meeting / f"sums-{number}"


def splits_path(meeting: Path, number: int) -> Path:
    """Return the path where ranks that hold parts of the same contexts meet."""
    return meeting / f"splits-{number}"


def rows_path(meeting: Path, place: int) -> Path:
    """Return the path where the stages meet, of each the rank at `place`."""
    return meeting / f"rows-{place}"
