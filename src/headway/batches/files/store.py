"""Store of uploaded files: records in the database, bytes in a folder; each owner sees its own.

Ids are generated here, so no path contains text of a client. A file exists when its record does:
the bytes are complete before the record is written, and the record is deleted before the bytes.
"""

import os
import secrets
import sqlite3
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from headway.core.clock import Clock
from headway.core.errors import RequestError
from headway.edge.database import Database

NEVER = 2**62
MESSAGE_PURPOSE = "message_batch"
"""Purpose of the requests and results of message batches, which `/v1/files` does not show."""
IN_USE = (
    "SELECT input_file FROM batches "
    "WHERE status IN ('validating', 'in_progress', 'cancelling', 'finalizing')"
)
"""Query for the ids of files that unfinished batches read."""


class File(msgspec.Struct, kw_only=True, omit_defaults=True):
    """OpenAI's file object."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"

    def public(self) -> dict[str, Any]:
        """Return the record as a client sees it: every field, defaults included."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


COLUMNS = "id, purpose, filename, bytes, created_at, expires_at"


def of_row(row: tuple[Any, ...]) -> File:
    return File(**dict(zip(COLUMNS.split(", "), row)))


def new_id(prefix: str) -> str:
    """Return a new id of 128 random bits: file-… or batch_…."""
    return prefix + secrets.token_hex(16)


class Files:
    """The files of one data folder."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self.clock = clock
        self.arriving: Counter[str] = Counter()
        """Owner → bytes of uploads in progress, which count in the quota like files."""

    @property
    def now_s(self) -> int:
        return int(self.clock.wall_s())

    def path(self, file_id: str) -> Path:
        """Return the path of the bytes of a file."""
        return self.database.files / file_id

    async def used_bytes(self, owner: str) -> int:
        """Return the bytes of the owner's complete files."""
        return await self.database.run(lambda connection: bytes_of(connection, owner))

    async def add(self, file: File, owner: str, part: Path, quota: float = inf) -> None:
        """Store the complete upload `part` as `file`; RequestError 413 beyond the owner's quota."""

        def work(connection: sqlite3.Connection) -> None:
            if bytes_of(connection, owner) + file.bytes > quota:
                raise over_quota()
            os.replace(part, self.path(file.id))
            insert(connection, file, owner)

        await self.database.run(work)

    async def get(self, file_id: str, owner: str) -> File:
        """Return a record; RequestError 404 for a missing file or one of another owner."""

        def work(connection: sqlite3.Connection) -> tuple[Any, ...] | None:
            query = f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ? AND purpose != ?"
            given = file_id, owner, MESSAGE_PURPOSE
            row: tuple[Any, ...] | None = connection.execute(query, given).fetchone()
            return row

        row = await self.database.run(work) if self.database.exists else None
        if row is None or (row[-1] or NEVER) <= self.now_s:
            raise no_such("file", file_id)
        return of_row(row)

    async def page(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[File], bool]:
        """Return at most `limit` records behind `after`, and whether there are more."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            place = "(SELECT created_at, id FROM files WHERE id = ? AND owner = ?)"
            return connection.execute(
                f"SELECT {COLUMNS} FROM files WHERE owner = ? AND purpose != ?"
                + " AND coalesce(expires_at, ?) > ?"
                + (" AND purpose = ?" if purpose else "")
                + (f" AND (created_at, id) {sign} {place}" if after else "")
                + f" ORDER BY created_at {order}, id {order} LIMIT ?",
                (
                    *(owner, MESSAGE_PURPOSE, NEVER, self.now_s),
                    *([purpose] if purpose else []),
                    *([after, owner] if after else []),
                    limit + 1,
                ),
            ).fetchall()

        if after is not None:
            await self.get(after, owner)
        rows = await self.database.run(work) if self.database.exists else []
        return [of_row(row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete record and bytes; RequestError while a batch reads the file."""
        await self.get(file_id, owner)

        def work(connection: sqlite3.Connection) -> None:
            if connection.execute(f"SELECT ? IN ({IN_USE})", (file_id,)).fetchone()[0]:
                raise RequestError(
                    "A batch reads this file; cancel the batch or wait for its end.",
                    param="file_id",
                    code="file_in_use",
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self.database.run(work)
        self.path(file_id).unlink(missing_ok=True)

    async def remove(self, file_ids: list[str]) -> None:
        """Delete records and bytes of files of any owner."""

        def work(connection: sqlite3.Connection) -> None:
            rows = [(file_id,) for file_id in file_ids]
            connection.executemany("DELETE FROM files WHERE id = ?", rows)

        await self.database.run(work)
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)

    async def remove_expired(self) -> None:
        """Delete expired files that no batch reads."""

        def work(connection: sqlite3.Connection) -> list[str]:
            query = f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({IN_USE}) RETURNING id"
            return [name for (name,) in connection.execute(query, (self.now_s,)).fetchall()]

        for file_id in await self.database.run(work):
            self.path(file_id).unlink(missing_ok=True)


def bytes_of(connection: sqlite3.Connection, owner: str) -> int:
    """Return the bytes of the owner's complete files."""
    query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?"
    return int(connection.execute(query, (owner,)).fetchone()[0])


def over_quota() -> RequestError:
    """Return the error 413: files and uploads in progress exceed the quota of a key."""
    return RequestError(
        "Your files would take more than this server keeps for one key; delete some.",
        param="file",
        code="file_quota_exceeded",
        status=413,
    )


def insert(connection: sqlite3.Connection, file: File, owner: str) -> None:
    """Write the record within the caller's transaction."""
    connection.execute(
        f"INSERT OR REPLACE INTO files (owner, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(owner, file.id, file.purpose, file.filename),
            *(file.bytes, file.created_at, file.expires_at),
        ),
    )


def no_such(kind: str, name: str) -> RequestError:
    """Return the error 404 for a missing record and, alike, for one of another owner."""
    return RequestError(
        f"There is no {kind} {name[:80]!r}.",
        param=f"{kind}_id",
        code=f"{kind}_not_found",
        status=404,
    )
