"""A file of a model folder or a state folder, opened only where it is a regular one.

Such a folder may come from anywhere. A FIFO under the name of config.json would keep its reader for
ever, /dev/zero would fill the memory, and opening some devices does something. What is no regular
file, or is larger than what is read at once, is an OSError before a byte is read.
"""

import errno
import os
import stat
from io import BufferedReader, TextIOWrapper
from pathlib import Path

MOST_BYTES = 2**28
"""What is read at once; the largest tokenizer.json published has 35 MB."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> os.stat_result:
    """What the file system says of a regular file; OSError for anything else."""
    found = path.stat()
    _check(found, path)
    return found


def open_handle(path: Path, flags: int = os.O_RDONLY) -> int:
    """A regular file, opened with `flags` of `os.open`; OSError for anything else."""
    check_regular(path)
    # the name may be another file's by now: a FIFO would keep a call without O_NONBLOCK
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BufferedReader:
    """The same for reading, as a file; reads are not short but at its end."""
    return open(open_handle(path, flags), "rb")


def open_text(path: Path, newline: str | None = None) -> TextIOWrapper:
    """The same as UTF-8; `newline` is as in `open`."""
    return TextIOWrapper(open_regular(path), encoding="utf-8", newline=newline)


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a regular file; OSError for anything else, and for one of more than `most_bytes`."""
    with open_regular(path) as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return found


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The same, as UTF-8; UnicodeDecodeError, which is a ValueError."""
    return read_bytes(path, most_bytes).decode()


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
