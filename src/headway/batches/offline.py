"""Offline batch: the same lines through the same endpoints, without a server, results in one file.

It answers the lines that are not in the output yet. A result is appended as one whole line; a line
that a kill cut short is removed when the output is opened again. So each `custom_id` is answered
once, however often the command is run.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from headway.batches.call import LineAnswer, batch_body, call
from headway.batches.lines import BatchLine, read_body
from headway.batches.results import Result, answer_result
from headway.batches.runner import error_answer
from headway.core.errors import HeadwayError, RequestError, UsageError
from headway.core.principal import Principal
from headway.core.service import BATCH_CLASS
from headway.edge.database import NO_SPACE
from headway.edge.keys import anonymous_caller

OFFLINE_CALLER = anonymous_caller().for_lines(Principal(name="offline", service_class=BATCH_CLASS))


class OutputEntry(msgspec.Struct):
    """Fields of a line of the output that identify it."""

    custom_id: str
    response: dict[str, msgspec.Raw] | None = None


class ResultFile:
    """The file of results, locked while open; `done` has the custom_ids in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise UsageError(
                f"Another headway batch writes {path}.", "Wait for it, or name another --output."
            ) from None
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}.", "Name another --output."
            ) from None
        self.done: set[str] = set()
        self.num_failed = 0
        self._read()

    def _read(self) -> None:
        """Read the present results, and remove a line that a kill cut short."""
        whole = 0
        with self.path.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                whole += len(data)
                self._learn(data)
        os.ftruncate(self._descriptor, whole)

    def _learn(self, data: bytes) -> None:
        try:
            line = msgspec.json.decode(data, type=OutputEntry)
        except msgspec.DecodeError:
            self.close()
            raise UsageError(
                f"{self.path} holds something else than results of a batch.",
                "Name another --output, or move it away.",
            ) from None
        self.done.add(line.custom_id)
        status = bytes((line.response or {}).get("status_code", b"0"))
        self.num_failed += status != b"200"

    def refuse_strangers(self, lines: Sequence[BatchLine]) -> None:
        """Raise UsageError if it has answers to lines that are not in the input."""
        strangers = self.done - {line.custom_id for line in lines}
        if strangers:
            raise UsageError(
                f"{self.path} has a result for {min(strangers)[:80]!r}, which is not in the input.",
                "Name another --output, or move it away.",
            )

    def write(self, result: Result) -> None:
        """Append one result, whole or not at all; HeadwayError when the disk is full."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        data = result.line + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            if error.errno not in NO_SPACE:
                raise
            raise HeadwayError(
                f"The disk is full; {self.path} holds the results so far.",
                "Free space and run the same command again: it goes on from there.",
            ) from None
        self.num_failed += result.failed

    def close(self) -> None:
        """Sync to disk, unlock and close."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)


@dataclass(slots=True)
class Tally:
    """Counts of this run."""

    num_lines: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, result: Result) -> None:
        self.num_lines += 1
        self.input_tokens += result.input_tokens
        self.output_tokens += result.output_tokens


async def answer_lines(
    endpoints: Mapping[str, ASGIApp],
    source: Path,
    lines: Sequence[BatchLine],
    output: ResultFile,
    *,
    concurrency: int,
    on_line: Callable[[], None],
) -> Tally:
    """Answer `lines` of `source`, `concurrency` at a time; HeadwayError when the disk is full."""
    tally, places = Tally(), asyncio.Semaphore(concurrency)

    async def one(line: BatchLine) -> None:
        try:
            answer = await ask(endpoints, source, line)
            result = answer_result(line.custom_id, answer.status, answer.request_id, answer.body)
            output.write(result)
            tally.add(result)
            on_line()
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                await places.acquire()
                group.create_task(one(line))
    except* HeadwayError as errors:
        raise errors.exceptions[0] from None
    return tally


async def ask(endpoints: Mapping[str, ASGIApp], source: Path, line: BatchLine) -> LineAnswer:
    """Return the answer to one line."""
    try:
        url, body = read_body(source, line)
        body = batch_body(body)
    except RequestError as error:
        return error_answer(error)
    return await call(endpoints[url], url, body, OFFLINE_CALLER)
