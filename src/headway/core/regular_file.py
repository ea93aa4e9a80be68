"""Safe opening of files in a model folder or a state folder: regular files only.

Such a folder may come from an untrusted source. A FIFO under the name of config.json would block
its reader for ever, /dev/zero would fill the memory, and opening some devices has side effects. A
file that is not regular, or too large to read at once, is an OSError before a byte is read.
"""

import errno
import os
import stat
from io import BufferedReader, TextIOWrapper
from pathlib import Path

MAX_BYTES = 2**28
"""Maximum bytes read at once; the largest published tokenizer.json has 35 MB."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; OSError for anything else."""
    status = path.stat()
    _check(status, path)
    return status


def open_handle(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file with `flags` of `os.open`; OSError for anything else."""
    check_regular(path)
    # the file may have been replaced by a FIFO, which would block without O_NONBLOCK
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BufferedReader:
    """Open a regular file for reading; only reads at its end are short."""
    return open(open_handle(path, flags), "rb")


def open_text(path: Path, newline: str | None = None) -> TextIOWrapper:
    """Open a regular file as UTF-8; `newline` is as in `open`."""
    return TextIOWrapper(open_regular(path), encoding="utf-8", newline=newline)


def read_bytes(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole regular file; OSError for anything else, and for more than `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return data


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """Read a whole regular file as UTF-8; UnicodeDecodeError, which is a ValueError."""
    return read_bytes(path, most_bytes).decode()


def _check(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
