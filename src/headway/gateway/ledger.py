"""Ledger of requests and attempts on disk: DIR/gateway/ledger.db, SQLite with a WAL.

A request gets a row when it begins; its progress is written once a second, and its usage before the
last byte of its answer is sent. After a SIGKILL at any moment the answers that clients saw complete
are exact in the ledger, and those cut off are `interrupted`, an estimate at most a second old. One
thread writes the rows, many per transaction. A row that cannot be written is counted and does not
affect other rows; a full disk loses rows, not answers.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from headway.core.errors import HeadwayError, RequestError, StorageError
from headway.edge.database import take_lock

log = logging.getLogger(__name__)

Result = TypeVar("Result")
RETENTION_S = 90 * 86_400
MAX_WAITING = 100_000
SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    task TEXT NOT NULL,
    task_class TEXT NOT NULL,
    route TEXT NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    estimated INTEGER NOT NULL DEFAULT 1,
    dollars REAL NOT NULL DEFAULT 0,
    team TEXT NOT NULL DEFAULT '',
    tags TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX IF NOT EXISTS requests_by_key ON requests (key, began_at);
CREATE INDEX IF NOT EXISTS requests_of_task ON requests (key, task);
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (began_at);
CREATE TABLE IF NOT EXISTS attempts (
    request TEXT NOT NULL,
    number INTEGER NOT NULL,
    upstream TEXT NOT NULL,
    outcome TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    estimated INTEGER NOT NULL,
    dollars REAL NOT NULL,
    ttft_s REAL,
    PRIMARY KEY (request, number)
) STRICT;
CREATE TABLE IF NOT EXISTS outcomes (
    key TEXT NOT NULL,
    task TEXT NOT NULL,
    success INTEGER NOT NULL,
    score REAL,
    source TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (key, task)
) STRICT;
CREATE TABLE IF NOT EXISTS rollouts (
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    state TEXT NOT NULL,
    step INTEGER NOT NULL,
    reason TEXT NOT NULL,
    evidence TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY,
    row TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS rollout_evidence (
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    kept BLOB NOT NULL,
    PRIMARY KEY (name, version)
) STRICT;
"""
VERSION = 1
"""Version of the columns, which the file has as its `user_version`."""
MIGRATIONS: dict[int, tuple[str, ...]] = {
    0: (
        "ALTER TABLE requests ADD COLUMN team TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN tags TEXT NOT NULL DEFAULT '[]'",
    ),
}
"""Version of a file → what makes the next one of it."""
BEGIN = (
    "INSERT INTO requests (id, key, task, task_class, route, began_at, status, prompt_tokens,"
    " team, tags) VALUES (?, ?, ?, ?, ?, ?, 'open', ?, ?, ?)"
)
PROGRESS = "UPDATE requests SET output_tokens = ?, dollars = ? WHERE id = ? AND status = 'open'"
SETTLE = (
    "UPDATE requests SET ended_at = ?, status = ?, attempts = ?, prompt_tokens = ?,"
    " cached_tokens = ?, output_tokens = ?, estimated = ?, dollars = ?, route = ? WHERE id = ?"
)
ATTEMPT = "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
ADD_OUTCOME = "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?, ?)"

SAVE_EVIDENCE = "INSERT OR REPLACE INTO rollout_evidence VALUES (?, ?, ?)"
ADD_KEY, DELETE_KEY = "INSERT INTO keys VALUES (?, ?)", "DELETE FROM keys WHERE name = ?"
CHANGE_ROLLOUT = "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?)"


SPEND_BY = {
    "key": "key",
    "team": "team",
    "model": "route",
    "tag": "coalesce(tag.value, '')",
    "day": "date(began_at, 'unixepoch')",
}
"""What spending is summed by → its expression."""
MAX_SPEND_ROWS, SPEND_S, MAX_SPEND_WAITING = 10_000, 10.0, 8
"""Rows of an answer, seconds that its query may take, and queries that may wait."""
PROGRESS_STEPS = 10_000


class SpendQuery(NamedTuple):
    """Question of GET /spend: names of `SPEND_BY`, seconds since 1970, a key or None for all."""

    by: tuple[str, ...]
    since_s: float
    until_s: float
    key: str | None = None

    def statement(self) -> tuple[str, tuple[Any, ...]]:
        """Return the SQL and its values."""
        groups = [SPEND_BY[name] for name in self.by]
        tokens = [f"coalesce(sum({name}_tokens), 0)" for name in ("prompt", "cached", "output")]
        columns = ", ".join([*groups, "count(*)", *tokens, "total(dollars)"])
        source = "requests" + (
            " LEFT JOIN json_each(requests.tags) AS tag" if "tag" in self.by else ""
        )
        where = "began_at >= ? AND began_at < ?" + (" AND key = ?" if self.key is not None else "")
        group = f" GROUP BY {', '.join(str(i + 1) for i in range(len(groups)))}" if groups else ""
        values = (self.since_s, self.until_s, *([self.key] if self.key is not None else []))
        order = f" ORDER BY {len(groups) + 5} DESC LIMIT {MAX_SPEND_ROWS + 1}"
        return f"SELECT {columns} FROM {source} WHERE {where}{group}{order}", values


class PastRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request of an earlier process that counts against a budget."""

    key: str
    task: str
    task_class: str
    route: str
    began_at: float
    dollars: float


class Ledger:
    """Ledger in one folder; without a folder it stores nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.num_lost = 0
        """Number of rows that could not be written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="spend")
        self._num_reading = 0
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._writing: asyncio.Future[None] | None = None

    async def open(self, now_s: float) -> None:
        """Open or create the file; requests left open by a kill become `interrupted`."""
        if self.folder is None:
            return
        await self._run(lambda: self._open(now_s))

    def _open(self, now_s: float) -> None:
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = take_lock(self.folder)
        connection = sqlite3.connect(
            self.folder / "ledger.db", isolation_level=None, check_same_thread=False
        )
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")
        migrate(connection, self.folder)
        connection.executescript(f"{SCHEMA} PRAGMA user_version = {VERSION}")
        connection.execute(
            "UPDATE requests SET status = 'interrupted', estimated = 1, ended_at = ?"
            " WHERE status = 'open'",
            (now_s,),
        )
        old = "SELECT id FROM requests WHERE began_at < ?"
        connection.execute(f"DELETE FROM attempts WHERE request IN ({old})", (now_s - RETENTION_S,))
        connection.execute("DELETE FROM requests WHERE began_at < ?", (now_s - RETENTION_S,))
        connection.execute("DELETE FROM outcomes WHERE at < ?", (now_s - RETENTION_S,))
        self._connection = connection

    # ── writing ─────────────────────────────────────────────────────────────────────────────

    def write(self, statement: str, *values: Any) -> None:
        """Queue a row for writing; `flushed` waits for it."""
        if self._connection is None:
            return
        if len(self._rows) >= MAX_WAITING:
            self.num_lost += 1
            return
        self._rows.append((statement, values))
        if self._writing is None:
            self._write_on()

    async def flushed(self) -> None:
        """Return when all queued rows are on disk, or counted as lost."""
        for _ in range(2 if self._rows else 1):  # the transaction in progress, then the next one
            if self._writing is None:
                return
            await asyncio.shield(self._writing)

    def _write_on(self) -> None:
        """Give the queued rows to the thread; rows queued meanwhile form the next transaction."""
        loop = asyncio.get_running_loop()
        rows, self._rows = self._rows, []
        done = self._writing = loop.create_future()

        def finish(_: asyncio.Future[None]) -> None:
            self._writing = None
            if self._rows:
                self._write_on()
            if not done.done():
                done.set_result(None)

        writing = loop.run_in_executor(self._thread, self._commit, rows)
        writing.add_done_callback(finish)

    def _commit(self, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        """In the thread: write the rows in one transaction, without those that fail."""
        connection = self._connection
        assert connection is not None
        num_written, failure = 0, None
        try:
            connection.execute("BEGIN IMMEDIATE")
            for statement, values in rows:
                try:
                    num_written += connection.execute(statement, values).rowcount > 0
                except Exception as error:  # a value that does not fit its column, a missing table
                    failure = error
                    if not connection.in_transaction:  # a full disk rolls back the transaction
                        raise
            connection.execute("COMMIT")
        except Exception as error:
            num_written, failure = 0, error
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        if num_written < len(rows):
            self.num_lost += len(rows) - num_written
            why = failure or "requests that have no row"
            log.error("the ledger lost %d rows: %s", len(rows) - num_written, why)

    async def store(self, statement: str, *values: Any) -> None:
        """Write one row and return when it is on the disk; raises HeadwayError if it is not.

        Unlike other rows it outlasts a loss of power: a key that was deleted does not come back.
        """
        connection = self._connection
        if connection is None:
            raise HeadwayError("There is no ledger.", "Name a --data-dir.")

        def work() -> None:
            connection.execute("PRAGMA synchronous = FULL")
            try:
                connection.execute(statement, values)
            finally:
                connection.execute("PRAGMA synchronous = NORMAL")

        await self._run(work)

    async def made_keys(self) -> list[str]:
        """Return the rows of the made keys, as JSON."""
        return [row for (row,) in await self._select("SELECT row FROM keys ORDER BY name")]

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    async def spent(self, since_s: float) -> list[PastRequest]:
        """Return the requests since a time, oldest first."""
        columns = "key, task, task_class, route, began_at, dollars"
        query = f"SELECT {columns} FROM requests WHERE began_at > ? ORDER BY began_at"
        return [PastRequest(*row) for row in await self._select(query, since_s)]

    async def spend(self, query: SpendQuery) -> list[tuple[Any, ...]]:
        """Return the sums of a question, the dearest first; raises RequestError.

        It is read in a thread of its own: no request waits for it.
        """
        if self.folder is None:
            return []
        if self._num_reading >= MAX_SPEND_WAITING:
            raise RequestError(
                "Too many questions for /spend wait; ask again.",
                code="rate_limit_exceeded",
                status=429,
                retry_after_s=1.0,
            )
        file, loop = self.folder / "ledger.db", asyncio.get_running_loop()
        self._num_reading += 1
        try:
            return await loop.run_in_executor(self._readers, read_spend, file, query)
        finally:
            self._num_reading -= 1

    async def outcomes(self, since_s: float) -> list[tuple[str, str, bool]]:
        """Return (key, task, success) of the outcomes since a time."""
        query = "SELECT key, task, success FROM outcomes WHERE at > ?"
        return [
            (key, task, bool(success)) for key, task, success in await self._select(query, since_s)
        ]

    async def rollout(self, name: str, version: str) -> tuple[str, int, str] | None:
        """Return (state, step, reason) of a version's rollout; None for a new one."""
        query = (
            "SELECT state, step, reason FROM rollouts WHERE name = ? AND version = ?"
            " ORDER BY rowid DESC LIMIT 1"
        )
        return next(
            ((state, step, why) for state, step, why in await self._select(query, name, version)),
            None,
        )

    async def evidence(self, name: str, version: str) -> bytes | None:
        """Return the saved evidence of a rollout's version; None for a new one."""
        query = "SELECT kept FROM rollout_evidence WHERE name = ? AND version = ?"
        return next((blob for (blob,) in await self._select(query, name, version)), None)

    async def _select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            return []
        connection = self._connection
        return await self._run(lambda: connection.execute(query, values).fetchall())

    async def _run(self, work: Callable[[], Result]) -> Result:
        def checked_work() -> Result:
            with storage_errors(self.folder):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, checked_work)

    async def close(self) -> None:
        """Write all queued rows, close and unlock; safe to call twice."""
        if self._connection is not None:
            await self.flushed()
            connection, self._connection = self._connection, None
            await self._run(connection.close)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._thread.shutdown(wait=False)
        self._readers.shutdown(wait=False)


def migrate(connection: sqlite3.Connection, folder: Path) -> None:
    """Bring the columns of an old file to this version, after a copy of it beside it.

    The copy is ledger.v0.db; a file of a newer version raises HeadwayError, and is not touched.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'requests'"
    if version > VERSION:
        raise HeadwayError(
            f"{folder / 'ledger.db'} has columns of version {version}, of a newer Headway.",
            "Start that one, or name another --data-dir.",
        )
    if version == VERSION or not connection.execute(query).fetchone()[0]:
        return
    copy = folder / f"ledger.v{version}.db"
    part = folder / f".ledger.v{version}.part"
    part.unlink(missing_ok=True)
    try:
        connection.execute("VACUUM INTO ?", (str(part),))
        part.chmod(0o600)
        os.replace(part, copy)
    except BaseException:  # a full disk keeps no half of a copy
        part.unlink(missing_ok=True)
        raise
    connection.execute("BEGIN IMMEDIATE")
    for number in range(version, VERSION):
        for statement in MIGRATIONS[number]:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
    log.info("the ledger has columns of version %d now; its copy is %s", VERSION, copy)


def read_made_names(file: Path) -> list[str]:
    """Return the names of the keys that operators made, out of a ledger's file, if there is one."""
    if not file.is_file():
        return []
    connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
    try:
        return [name for (name,) in connection.execute("SELECT name FROM keys ORDER BY name")]
    except sqlite3.OperationalError:  # a ledger of before there were such keys
        return []
    finally:
        connection.close()


def read_spend(file: Path, query: SpendQuery) -> list[tuple[Any, ...]]:
    """Return the sums of a question out of a ledger's file; raises RequestError.

    The file may be that of a running gateway: it is only read.
    """
    statement, values = query.statement()
    until_s = time.monotonic() + SPEND_S
    connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.set_progress_handler(lambda: time.monotonic() > until_s, PROGRESS_STEPS)
        rows = connection.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        raise RequestError(
            f"The ledger cannot be read: {error}; ask for fewer days.", code="ledger", status=503
        ) from error
    finally:
        connection.close()
    if len(rows) > MAX_SPEND_ROWS:
        raise RequestError(
            f"The answer has more than {MAX_SPEND_ROWS:,} rows; ask for fewer days, or by less.",
            param="by",
            code="too_many_values",
        )
    return rows


@contextlib.contextmanager
def storage_errors(folder: Path | None) -> Iterator[None]:
    """Turn errors of the disk and SQLite into a HeadwayError with a fix."""
    try:
        yield
    except StorageError:
        raise HeadwayError(
            f"Another gateway keeps its ledger in {folder}.",
            "Start one of them with another --data-dir.",
        ) from None
    except (sqlite3.Error, OSError) as error:
        raise HeadwayError(
            f"The ledger cannot be used: {error}.", "Check --data-dir, and the disk."
        ) from error
