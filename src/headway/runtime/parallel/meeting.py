"""Where the ranks of a model find each other: a folder in memory that only this user reads.

sums-0, sums-1, …   of each stage: the memory that its ranks share, or gloo's file
rows-0, rows-1, …   of each place in a stage: gloo's file of the stages one behind the other
"""

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from headway.core.parallel import Parallel
from headway.runtime.parallel.shared import memory_bytes

log = logging.getLogger(__name__)

SHARED_FOLDER = Path("/dev/shm")
NO_ROOM = (
    "%s has no %s bytes for %d ranks (%s): they meet by gloo, which is slower. Give it more room "
    "(a container's --shm-size)."
)


def open_meeting(parallel: Parallel) -> tuple[Path, Parallel]:
    """(the folder, how ranks meet there): with zeros for what the ranks of a stage share.

    Where memory has no room for these, ranks meet by gloo.
    """
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else None
    meeting = Path(tempfile.mkdtemp(prefix="headway-ranks-", dir=folder))
    if parallel.transport != "shared":
        return meeting, parallel
    paths = [sums_at(meeting, stage) for stage in range(parallel.stages)]
    try:
        for path in paths:
            share(path, parallel.num_together)
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        wanted = parallel.stages * memory_bytes(parallel.num_together)
        log.warning(NO_ROOM, meeting.parent, f"{wanted:,}", parallel.num_ranks, error)
        return meeting, replace(parallel, transport="gloo")
    return meeting, parallel


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
