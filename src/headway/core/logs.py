"""Log lines that nobody can forge: one event is one line, whatever a client has sent.

Given a level and a format it sets up the root logger of a process. It promises that line breaks,
escape sequences and characters that turn text around come out escaped ("\\n", "\\x1b[2J"), in the
message and in what an exception says; a traceback follows its line indented, or in JSON as a field.
"""

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

import msgspec

QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
"""Loggers of others: only their errors are shown, for a stranger can make them warn at will."""
UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format (bidirectional marks), surrogate, line and paragraph."""


def plain(text: str) -> str:
    """`text` on one line: a line break → \\n, ESC → \\x1b, a right-to-left mark → \\u202e."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in UNSAFE else c
        for c in text
    )


class TextFormatter(logging.Formatter):
    """2026-11-21 10:00:00,123 WARNING headway.server.app ignored fields: colour."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname} {record.name} "
        line += plain(record.getMessage())
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n    ".join([line, *map(plain, trace.split("\n"))]) if trace else line


class JsonFormatter(logging.Formatter):
    """{"time": "2026-11-21T10:00:00.123+00:00", "level": "warning", "logger": …, "message": …}."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": plain(record.getMessage()),
        }
        if isinstance(record.msg, msgspec.Struct):
            content["request"] = harmless(msgspec.to_builtins(record.msg))
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            content["trace"] = [plain(line) for line in lines]
        return msgspec.json.encode(content).decode()


def harmless(value: Any) -> Any:
    """The same with each text on one line: {"id": "a\\nb"} → {"id": "a\\\\nb"}."""
    if isinstance(value, dict):
        return {key: harmless(each) for key, each in value.items()}
    return plain(value) if isinstance(value, str) else value


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


class Handler(logging.StreamHandler[TextIO]):
    """Writes lines; where they cannot be written (a full disk) they are lost, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A line that could not be written."""


def set_up_logs(level: str, format: str) -> None:
    """The root logger of this process, to stderr."""
    handler = Handler(sys.stderr)
    handler.setFormatter(FORMATTERS[format]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.captureWarnings(True)
    if format == "json":
        sys.excepthook = log_uncaught


def log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What ends the process is a line as well."""
    logging.getLogger("headway").critical("the process fails", exc_info=(kind, error, trace))


def line_of(message: str, level: int, format: str) -> str:
    """What is printed: as it is in text; in JSON one line of the log, whatever lines it has."""
    if format == "text":
        return message
    message = "; ".join(line.strip() for line in message.splitlines())
    return JsonFormatter().format(
        logging.LogRecord("headway", level, "", 0, message, args=None, exc_info=None)
    )


def format_of(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The --log-format that is in force, or that of a command line which cannot be read."""
    if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers):
        return "json"
    words = " ".join(arguments).replace("--log-format=", "--log-format ")
    given = environ.get("HEADWAY_LOG_FORMAT") == "json" and "--log-format text" not in words
    return "json" if given or "--log-format json" in words else "text"


MAX_LINES_WAITING = 10_000


class Waiting(logging.handlers.QueueHandler):
    """Hands records to the thread that writes them as they are; the text is made there.

    A terminal that stands still, or a pipe that nobody reads, holds up that thread and no request;
    what does not fit the queue by then is lost.
    """

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record itself: its message does not change any more."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Drop it where too many wait."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class Writer(logging.Handler):
    """Writes lines to a file descriptor from one thread; where that is not possible they are lost.

    It has no lock and no buffer that the end of the process could wait for.
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.formatter, self._fd = formatter, fd

    def createLock(self) -> None:  # noqa: N802
        """One thread writes."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Newer versions of Python take the lock here, which there is none of."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """All of the line, however much the system takes at once."""
        line = f"{self.format(record)}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._fd, line) :]


@contextlib.contextmanager
def written_aside(name: str, format: str) -> Iterator[None]:
    """Write the lines of the logger `name` to stderr in a thread; on leaving, the last of them.

    Give it the logger of what happens often, such as a line for each request.
    """
    logger, lines = logging.getLogger(name), queue.Queue[logging.LogRecord](MAX_LINES_WAITING)
    handler = Waiting(lines)
    writer = Writer(sys.stderr.fileno(), FORMATTERS[format]())
    listener = logging.handlers.QueueListener(lines, writer)
    logger.addHandler(handler)
    logger.propagate = False
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        stop(listener, lines)


def stop(listener: logging.handlers.QueueListener, lines: queue.Queue[logging.LogRecord]) -> None:
    """Write what waits, but for no longer than a second: nobody may read any more.

    Where the queue is full its oldest line makes way for the end, so that the thread finds one.
    """
    thread = listener._thread
    while True:
        try:
            listener.enqueue_sentinel()
            break
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                lines.get_nowait()
    if thread is not None:
        thread.join(timeout=1.0)
