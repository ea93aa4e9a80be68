"""A batch without a server: the same lines through the same endpoints, results to one file.

Given a state with an engine in this process it answers the lines that the output does not hold yet.
A result is appended as one whole line or, after a kill, not at all: what a kill cut is taken off
when the output is opened again. So each `custom_id` is answered once, however often it is begun.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from headway.batches.call import Answer, batch_body, call
from headway.batches.lines import Line, read_body
from headway.batches.results import Result, answered
from headway.batches.runner import refused
from headway.core.errors import HeadwayError, RequestError, UsageError
from headway.core.principal import Principal
from headway.core.service import BATCH_CLASS
from headway.edge.database import NO_SPACE
from headway.edge.keys import anonymous_caller

WHO = anonymous_caller().for_lines(Principal(name="offline", service_class=BATCH_CLASS))


class Done(msgspec.Struct):
    """What a line of the output says of itself."""

    custom_id: str
    response: dict[str, msgspec.Raw] | None = None


class Output:
    """The file of results, ours alone while it is open; `done` are the custom_ids it holds."""

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
        """Learn what is there, and take off a line that a kill cut short."""
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
            line = msgspec.json.decode(data, type=Done)
        except msgspec.DecodeError:
            self.close()
            raise UsageError(
                f"{self.path} holds something else than results of a batch.",
                "Name another --output, or move it away.",
            ) from None
        self.done.add(line.custom_id)
        status = bytes((line.response or {}).get("status_code", b"0"))
        self.num_failed += status != b"200"

    def refuse_strangers(self, lines: Sequence[Line]) -> None:
        """Raise UsageError when it holds answers to lines that are not in the input."""
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
        """Make sure of it on the disk, and unlock."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)


@dataclass(slots=True)
class Tally:
    """What this run did."""

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
    lines: Sequence[Line],
    output: Output,
    *,
    concurrency: int,
    on_line: Callable[[], None],
) -> Tally:
    """Answer `lines` of `source`, `concurrency` at a time; raises what `Output.write` raises."""
    tally, places = Tally(), asyncio.Semaphore(concurrency)

    async def one(line: Line) -> None:
        try:
            answer = await ask(endpoints, source, line)
            result = answered(line.custom_id, answer.status, answer.request_id, answer.body)
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


async def ask(endpoints: Mapping[str, ASGIApp], source: Path, line: Line) -> Answer:
    """The answer to one line."""
    try:
        url, body = read_body(source, line)
        body = batch_body(body)
    except RequestError as error:
        return refused(error)
    return await call(endpoints[url], url, body, WHO)
