"""Where the ranks of a model find each other: a folder in memory that only this user reads.

    sums-0, sums-1, …   of each stage: the memory that its ranks share, or gloo's file
    rows-0, rows-1, …   of each place in a stage: gloo's file of the stages one behind the other
"""

import os
import shutil
import tempfile
from pathlib import Path

from headway.core.errors import CapacityError
from headway.core.parallel import Parallel
from headway.runtime.parallel.shared import memory_bytes

SHARED_FOLDER = Path("/dev/shm")


def open_meeting(parallel: Parallel) -> Path:
    """The folder, with zeros for the sums of each stage where they are in shared memory.

    CapacityError where these do not fit.
    """
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else None
    meeting = Path(tempfile.mkdtemp(prefix="headway-ranks-", dir=folder))
    if parallel.size == 1 or parallel.transport != "shared":
        return meeting
    try:
        for stage in range(parallel.stages):
            share(sums_at(meeting, stage), parallel.size)
    except OSError as error:
        shutil.rmtree(meeting)
        num_bytes = parallel.stages * memory_bytes(parallel.size)
        raise CapacityError(
            f"{meeting.parent} has no {num_bytes:,} bytes for {parallel.num_ranks} ranks: {error}.",
            "Give it more room (a container's --shm-size), or use --rank-transport gloo.",
        ) from error
    return meeting


def share(path: Path, size: int) -> None:
    """Make the memory that `size` ranks share; OSError where it does not fit."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, memory_bytes(size))


def sums_at(meeting: Path, stage: int) -> Path:
    """Where the ranks of a stage meet."""
    return meeting / f"sums-{stage}"


def rows_at(meeting: Path, place: int) -> Path:
    """Where the stages meet, of each the rank at `place`."""
    return meeting / f"rows-{place}"
