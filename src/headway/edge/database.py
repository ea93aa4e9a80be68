"""Data folder: an SQLite database, a folder of files, and a lock of the process that owns it.

    DIR/lock          held while a server lives; the kernel releases it with the process
    DIR/headway.db    records of files and batches, and the lines of unfinished batches
    DIR/files/ID      uploads and results, by file id
    DIR/files/*.part  uploads in progress; leftovers of a kill are removed at the next start

The folder is created when something is first stored, or opened at the start if there is stored
work. All statements run in one thread, each call as one transaction: after a SIGKILL at any moment
a call has happened or has not. Raises StorageError.

If another process owns the folder, `spare` is used instead, and from then on always:

    DIR               the first server of a user
    DIR/port-8001     a second one on port 8001, and later ones on that port
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headway.core.errors import EngineDownError, StorageError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
IN_USE = "storage_in_use"
OWN_NAME = re.compile(r"file-[0-9a-f]{32}(\.part)?")
"""Names of files below `files`."""
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, created_at, id);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    input_file TEXT NOT NULL,
    record BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, created_at, id);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    size INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    failed INTEGER,
    answer BLOB,
    UNIQUE (batch, number)
) STRICT;
"""


def default_folder() -> Path:
    """Return $XDG_STATE_HOME/headway, usually ~/.local/state/headway; .headway without a home."""
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "headway"
    except RuntimeError:
        return Path(".headway")


class Database:
    """Data folder of a server, or its spare folder."""

    def __init__(self, folder: Path, spare: Path | None = None) -> None:
        self.folder, self._spare = folder, spare
        if spare is not None and (spare / "headway.db").exists():
            self.folder, self._spare = spare, None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._closed = False

    @property
    def files(self) -> Path:
        """Return the folder of file contents."""
        return self.folder / "files"

    @property
    def exists(self) -> bool:
        """Return whether an earlier server stored something here."""
        return (self.folder / "headway.db").exists()

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    async def claim(self) -> None:
        """Lock the folder if something is stored there, or use the spare folder."""

        def lock() -> None:
            with storage_errors():
                if self.exists and self._lock is None:
                    self._take_lock()

        await asyncio.get_running_loop().run_in_executor(self._thread, lock)

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `work` in the database's thread, as one transaction; raises StorageError."""
        if self._closed:
            raise EngineDownError("The server is shutting down.", code="shutting_down")

        def transaction() -> Result:
            with storage_errors():
                connection = self._opened()
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    def _opened(self) -> sqlite3.Connection:
        """Return the connection, which the first call opens."""
        if self._connection is None:
            if self._lock is None:
                self._take_lock()
            self.files.mkdir(mode=0o700, exist_ok=True)
            check_regular(self.folder)
            connection = sqlite3.connect(
                self.folder / "headway.db", isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(SCHEMA)
                self._sweep(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _take_lock(self) -> None:
        """Create and lock the folder; if another process owns it, the spare one."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock = take_lock(self.folder)
        except StorageError:
            if self._spare is None:
                raise
            log.info(
                "another process keeps files and batches in %s; this one keeps its own in %s",
                self.folder,
                self._spare,
            )
            self.folder, self._spare = self._spare, None
            self._take_lock()

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Remove contents without a record: uploads and deletions that a kill interrupted.

        Only files with names of the form that this class writes are removed.
        """
        known = {name for (name,) in connection.execute("SELECT id FROM files")}
        for path in self.files.iterdir():
            if path.name not in known and OWN_NAME.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Close and unlock; safe to call twice."""
        if self._closed:
            return
        self._closed = True

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
            if self._lock is not None:
                os.close(self._lock)
            self._connection = self._lock = None

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown(wait=False)


def check_regular(folder: Path) -> None:
    """Raise StorageError where the database is a pipe or a device, or `files` is a link.

    SQLite would wait for a pipe, and report a device as a full disk.
    """
    for name in ("headway.db", "headway.db-wal", "headway.db-shm"):
        path = folder / name
        if os.path.lexists(path) and not path.is_file():
            raise unusable_error(f"{name} in it is not a regular file; move it away")
    if (folder / "files").is_symlink():
        raise unusable_error("files in it is a link; make it a folder, or the data folder the link")


def take_lock(folder: Path) -> int:
    """Return the descriptor that holds the folder's lock; StorageError 503 if it is taken."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StorageError(
            "Another server keeps files and batches in the same data folder; "
            "start one of them with another --data-dir.",
            code=IN_USE,
            status=503,
        ) from None
    return descriptor


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Raise errors of the disk and SQLite as StorageError, without the folder's name in it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
        ):
            raise disk_full_error() from error
        raise StorageError(
            f"The database of files and batches cannot be used: {error}.",
            code="storage_unusable",
            status=503,
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full_error() from error
        raise unusable_error(error.strerror) from error


def unusable_error(reason: str | None) -> StorageError:
    """Return the error of a folder that cannot be written, or holds foreign files."""
    return StorageError(
        f"The data folder cannot be used: {reason}.", code="storage_unusable", status=503
    )


def disk_full_error() -> StorageError:
    """Return the error of a full disk."""
    return StorageError("The disk of files and batches is full; free space or delete files.")
