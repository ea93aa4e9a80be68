"""Store of batches and their lines in the database; each change is one transaction.

    validating ─► in_progress ─► finalizing ─► completed
        │             ├─► cancelling ─► cancelled
        ▼             └─► (24 h) ─► expired
      failed

A line's answer is written once, together with the counts; a line with an answer never runs again.
The lines are deleted once the output files are written.
"""

import hashlib
import os
import sqlite3
from typing import Any, Literal

import msgspec

from headway.batches.files.store import MESSAGE_PURPOSE, File, Files, insert, no_such
from headway.batches.lines import MESSAGES, BatchLine, Checked, Fault
from headway.batches.results import Result, message_line, unanswered_line
from headway.core.errors import RequestError
from headway.core.principal import Principal

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED = ("validating", "in_progress", "cancelling", "finalizing")
PREFIX, MESSAGE_PREFIX = "batch_", "msgbatch_"
"""Prefixes of the ids of OpenAI's batches and of Anthropic's."""
REASONS = {
    "expired": ("batch_expired", "The batch's 24 hours were over before this line ran."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this line ran."),
}

MESSAGE_ENDS = {"expired": "expired", "cancelled": "canceled"}


class BatchCounts(msgspec.Struct, kw_only=True):
    """`request_counts`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokenDetails(msgspec.Struct, kw_only=True):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Parts of the output tokens, which batches do not count separately."""

    reasoning_tokens: int = 0


class BatchTokens(msgspec.Struct, kw_only=True):
    """`usage`, the sum of all lines."""

    input_tokens: int = 0
    input_tokens_details: CachedTokenDetails = msgspec.field(default_factory=CachedTokenDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int = 0


class BatchPrice(msgspec.Struct, kw_only=True):
    """Price of the tokens of a class, as a share of the price of an interactive token.

    The lines run in that class. A cached prompt token costs the share `cached` of another one.
    """

    service_class: str = "batch"
    share: float = 0.5
    cached: float = 0.1


class Errors(msgspec.Struct, kw_only=True):
    """`errors`: the faults of a failed validation."""

    object: str = "list"
    data: list[Fault]


class BatchRecord(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, with `price`; `principal` and the files' lifetime are not shown."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: Errors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    usage: BatchTokens = msgspec.field(default_factory=BatchTokens)
    metadata: dict[str, str] | None = None
    price: BatchPrice = msgspec.field(default_factory=BatchPrice)
    principal: Principal = Principal()
    output_lifetime_s: int | None = None

    def public(self) -> dict[str, Any]:
        """Return the record as a client sees it."""
        hidden = ("principal", "output_lifetime_s")
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in hidden}

    def move(self, status: Status, now_s: int) -> None:
        """Enter `status` and note the time: `move("completed", 5)` sets completed_at."""
        self.status = status
        if getattr(self, f"{status}_at") is None:
            setattr(self, f"{status}_at", now_s)


encode = msgspec.json.encode
decode = msgspec.json.Decoder(BatchRecord).decode


class Batches:
    """The batches of one data folder."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.database = files.database

    @property
    def now_s(self) -> int:
        return self.files.now_s

    async def add(self, batch: BatchRecord, most_unfinished: int) -> None:
        """Store a new batch; RequestError 429 if its owner has too many unfinished ones.

        RequestError 404 if its file was deleted in the meantime: no other batch protects it.
        """

        def work(connection: sqlite3.Connection) -> None:
            query = "SELECT 1 FROM files WHERE id = ? AND owner = ?"
            reads = batch.input_file_id, batch.principal.name
            if connection.execute(query, reads).fetchone() is None:
                raise no_such("file", batch.input_file_id)
            marks = ", ".join("?" * len(UNFINISHED))
            query = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({marks})"
            (count,) = connection.execute(query, (batch.principal.name, *UNFINISHED)).fetchone()
            if count >= most_unfinished:
                raise RequestError(
                    f"{count} of your batches are unfinished; at most {most_unfinished} may be.",
                    code="batch_limit_exceeded",
                    status=429,
                    retry_after_s=60,
                )
            connection.execute(
                "INSERT INTO batches (id, owner, status, created_at, input_file, record) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(batch.id, batch.principal.name, batch.status, batch.created_at),
                    *(batch.input_file_id, encode(batch)),
                ),
            )

        await self.database.run(work)

    async def get(
        self, batch_id: str, owner: str | None = None, prefix: str = PREFIX
    ) -> BatchRecord:
        """Return a record; RequestError 404 if it is missing, of another owner or of another kind.

        Without an `owner` the record may be of any owner and any kind.
        """

        def work(connection: sqlite3.Connection) -> bytes | None:
            query = "SELECT record FROM batches WHERE id = ? AND owner = coalesce(?, owner)"
            row = connection.execute(query, (batch_id, owner)).fetchone()
            return row[0] if row else None

        is_other = owner is not None and not batch_id.startswith(prefix)
        record = None
        if self.database.exists and not is_other:
            record = await self.database.run(work)
        if record is None:
            raise no_such("batch", batch_id)
        return decode(record)

    async def page(
        self,
        owner: str,
        after: str | None,
        limit: int,
        *,
        before: str | None = None,
        prefix: str = PREFIX,
    ) -> tuple[list[BatchRecord], bool]:
        """Return at most `limit` batches, newest first, and whether there are more.

        They are those that follow `after`, or those just `before` one.
        """
        edge = after if after is not None else before
        sign, order = ("<", "DESC") if before is None else (">", "ASC")

        def work(connection: sqlite3.Connection) -> list[tuple[bytes]]:
            place = "(SELECT created_at, id FROM batches WHERE id = ?)"
            return connection.execute(
                "SELECT record FROM batches WHERE owner = ? AND id GLOB ?"
                + (f" AND (created_at, id) {sign} {place}" if edge else "")
                + f" ORDER BY created_at {order}, id {order} LIMIT ?",
                (owner, prefix + "*", *([edge] if edge else []), limit + 1),
            ).fetchall()

        if edge is not None:
            await self.get(edge, owner, prefix)
        rows = await self.database.run(work) if self.database.exists else []
        batches = [decode(record) for (record,) in rows[:limit]]
        return batches if before is None else batches[::-1], len(rows) > limit

    async def unfinished(self) -> list[str]:
        """Return the ids of the unfinished batches, the oldest first."""

        def work(connection: sqlite3.Connection) -> list[str]:
            marks = ", ".join("?" * len(UNFINISHED))
            query = f"SELECT id FROM batches WHERE status IN ({marks}) ORDER BY created_at, id"
            return [name for (name,) in connection.execute(query, UNFINISHED)]

        return await self.database.run(work)

    async def cancel(self, batch_id: str, owner: str, prefix: str = PREFIX) -> BatchRecord:
        """Start cancelling; finished lines stay. RequestError 400 if the batch has ended."""
        ending = ("finalizing",) if prefix == MESSAGE_PREFIX else ()  # is in progress there

        def work(connection: sqlite3.Connection) -> BatchRecord:
            batch = load(connection, batch_id)
            if batch.status in ("validating", "in_progress"):
                batch.move("cancelling", self.now_s)
                save(connection, batch)
            elif batch.status not in ("cancelling", "cancelled", *ending):
                raise RequestError(
                    f"The batch is {batch.status}; only one that is validating or in progress can "
                    "be cancelled.",
                    param="batch_id",
                    code="batch_not_cancellable",
                )
            return batch

        await self.get(batch_id, owner, prefix)
        return await self.database.run(work)

    async def delete(self, batch_id: str) -> None:
        """Delete the record; RequestError 400 while the batch is unfinished."""

        def work(connection: sqlite3.Connection) -> None:
            if load(connection, batch_id).status in UNFINISHED:
                raise RequestError(
                    "The batch is in progress; cancel it, or wait for its end.",
                    param="batch_id",
                    code="batch_not_ended",
                )
            connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

        await self.database.run(work)

    async def begin(self, batch_id: str, checked: Checked) -> BatchRecord:
        """End the validation: store the lines, or fail; a cancelled batch stays as it is."""

        def work(connection: sqlite3.Connection) -> BatchRecord:
            batch = load(connection, batch_id)
            if batch.status != "validating":
                return batch
            batch.request_counts.total = len(checked.lines)
            if checked.num_faults:
                batch.request_counts = BatchCounts()
                batch.errors = Errors(data=checked.faults)
                batch.move("failed", self.now_s)
            else:
                batch.model = checked.model
                batch.move("in_progress", self.now_s)
                rows = ((batch_id, n.number, n.custom_id, n.start, n.size) for n in checked.lines)
                connection.executemany(
                    "INSERT INTO lines (batch, number, custom_id, start, size) "
                    "VALUES (?, ?, ?, ?, ?)",
                    rows,
                )
            save(connection, batch)
            return batch

        return await self.database.run(work)

    async def waiting(self, batch_id: str, after: int, limit: int) -> list[BatchLine]:
        """Return the next lines without an answer behind line number `after`."""

        def work(connection: sqlite3.Connection) -> list[BatchLine]:
            rows = connection.execute(
                "SELECT number, custom_id, start, size, tries FROM lines "
                "WHERE batch = ? AND number > ? AND answer IS NULL ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            )
            return [BatchLine(*row) for row in rows]

        return await self.database.run(work)

    async def tried(self, batch_id: str, number: int) -> None:
        """Count a death of the engine while this line ran."""

        def work(connection: sqlite3.Connection) -> None:
            query = "UPDATE lines SET tries = tries + 1 WHERE batch = ? AND number = ?"
            connection.execute(query, (batch_id, number))

        await self.database.run(work)

    async def finish_line(self, batch_id: str, number: int, result: Result) -> None:
        """Write a line's answer, once, and count it."""

        def work(connection: sqlite3.Connection) -> None:
            changed = connection.execute(
                "UPDATE lines SET failed = ?, answer = ? "
                "WHERE batch = ? AND number = ? AND answer IS NULL",
                (int(result.failed), result.line, batch_id, number),
            ).rowcount
            if changed:
                batch = load(connection, batch_id)
                count(batch, result)
                save(connection, batch)

        await self.database.run(work)

    async def close_lines(self, batch_id: str, *, expired: bool) -> BatchRecord:
        """End the running of lines: enter finalizing, unless the batch is being cancelled."""

        def work(connection: sqlite3.Connection) -> BatchRecord:
            batch = load(connection, batch_id)
            if batch.status == "in_progress":
                if expired:
                    batch.move("expired", self.now_s)
                batch.move("finalizing", self.now_s)
                save(connection, batch)
            return batch

        return await self.database.run(work)

    async def finalize(self, batch_id: str) -> BatchRecord:
        """Write the output files, then the last status; after a kill in between it is repeated."""

        def work(connection: sqlite3.Connection) -> BatchRecord:
            batch = load(connection, batch_id)
            if batch.status not in ("cancelling", "finalizing"):
                return batch
            end = last_status(batch)
            batch.output_file_id = self._write(connection, batch, "output", end)
            batch.error_file_id = self._write(connection, batch, "error", end)
            batch.move(end, self.now_s)
            connection.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            save(connection, batch)
            return batch

        return await self.database.run(work)

    def _write(
        self, connection: sqlite3.Connection, batch: BatchRecord, kind: str, end: Status
    ) -> str | None:
        """Write one output file of a batch and return its (deterministic) id; None if empty."""
        file_id = "file-" + hashlib.sha256(f"{batch.id}/{kind}".encode()).hexdigest()[:32]
        part = self.files.path(file_id + ".part")
        size = 0
        try:
            with part.open("wb") as target:
                for line in result_lines(connection, batch, kind, end):
                    size += target.write(line + b"\n")
                target.flush()
                os.fsync(target.fileno())
            if not size:
                return None
            os.replace(part, self.files.path(file_id))
        finally:
            part.unlink(missing_ok=True)
        now_s, lifetime_s = self.now_s, batch.output_lifetime_s
        file = File(
            id=file_id,
            bytes=size,
            created_at=now_s,
            expires_at=None if lifetime_s is None else now_s + lifetime_s,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=MESSAGE_PURPOSE if batch.endpoint == MESSAGES else "batch_output",
        )
        insert(connection, file, batch.principal.name)
        return file_id


def result_lines(connection: sqlite3.Connection, batch: BatchRecord, kind: str, end: Status) -> Any:
    """Yield the lines of the output file, or of the error file with the lines that did not run."""
    query = "SELECT answer FROM lines WHERE batch = ? AND failed = ? ORDER BY number"
    for (answer,) in connection.execute(query, (batch.id, int(kind == "error"))):
        yield answer
    if kind == "error" and end in REASONS:
        query = "SELECT custom_id FROM lines WHERE batch = ? AND answer IS NULL ORDER BY number"
        for (custom_id,) in connection.execute(query, (batch.id,)):
            if batch.endpoint == MESSAGES:
                yield message_line(custom_id, MESSAGE_ENDS[end])
            else:
                yield unanswered_line(custom_id, *REASONS[end])


def last_status(batch: BatchRecord) -> Status:
    """Return the status that a batch has after finalizing."""
    if batch.cancelling_at is not None:
        return "cancelled"
    return "expired" if batch.expired_at is not None else "completed"


def count(batch: BatchRecord, result: Result) -> None:
    """Add one result to the sums of the batch."""
    counts, usage = batch.request_counts, batch.usage
    counts.failed += result.failed
    counts.completed += not result.failed
    usage.input_tokens += result.input_tokens
    usage.input_tokens_details.cached_tokens += result.cached_tokens
    usage.output_tokens += result.output_tokens
    usage.total_tokens += result.input_tokens + result.output_tokens


def load(connection: sqlite3.Connection, batch_id: str) -> BatchRecord:
    """Return a record; RequestError 404 if it was deleted in the meantime."""
    row = connection.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise no_such("batch", batch_id)
    return decode(row[0])


def save(connection: sqlite3.Connection, batch: BatchRecord) -> None:
    connection.execute(
        "UPDATE batches SET status = ?, record = ? WHERE id = ?",
        (batch.status, encode(batch), batch.id),
    )
