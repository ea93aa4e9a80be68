"""Logs that a client cannot forge: one event is one line, whatever a request contains.

`set_up_logs` configures the root logger of a process. Line breaks, escape sequences and characters
that change the direction of text are escaped ("\\n", "\\x1b[2J"), in messages and in exceptions; a
traceback follows its line indented, or in JSON as a field.
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

QUIET_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
"""Loggers of libraries: only their errors are shown, because clients can trigger their warnings."""
UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format (bidirectional marks), surrogate, line and paragraph."""


def escape_line(text: str) -> str:
    """Escape text to one line: a line break → \\n, ESC → \\x1b, a right-to-left mark → \\u202e."""
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
        line += escape_line(record.getMessage())
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n    ".join([line, *map(escape_line, trace.split("\n"))]) if trace else line


class JsonFormatter(logging.Formatter):
    """{"time": "2026-11-21T10:00:00.123+00:00", "level": "warning", "logger": …, "message": …}."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": escape_line(record.getMessage()),
        }
        if isinstance(record.msg, msgspec.Struct):
            content["request"] = escape_texts(msgspec.to_builtins(record.msg))
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            content["trace"] = [escape_line(line) for line in lines]
        return msgspec.json.encode(content).decode()


def escape_texts(value: Any) -> Any:
    """Escape each text of a value: {"id": "a\\nb"} → {"id": "a\\\\nb"}."""
    if isinstance(value, dict):
        return {key: escape_texts(each) for key, each in value.items()}
    return escape_line(value) if isinstance(value, str) else value


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


class LossyHandler(logging.StreamHandler[TextIO]):
    """Handler that drops lines which cannot be written, for example to a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a line that could not be written."""


def set_up_logs(level: str, format: str) -> None:
    """Configure the root logger of this process, to stderr."""
    handler = LossyHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[format]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.captureWarnings(True)
    if format == "json":
        sys.excepthook = log_uncaught


def log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Log the exception that ends the process."""
    logging.getLogger("headway").critical("the process fails", exc_info=(kind, error, trace))


def line_of(message: str, level: int, format: str) -> str:
    """Format a message for printing: unchanged as text; in JSON as one line of the log."""
    if format == "text":
        return message
    message = "; ".join(line.strip() for line in message.splitlines())
    return JsonFormatter().format(
        logging.LogRecord("headway", level, "", 0, message, args=None, exc_info=None)
    )


def format_of(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the --log-format in force, or that of a command line which cannot be parsed."""
    if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers):
        return "json"
    words = " ".join(arguments).replace("--log-format=", "--log-format ")
    given = environ.get("HEADWAY_LOG_FORMAT") == "json" and "--log-format text" not in words
    return "json" if given or "--log-format json" in words else "text"


MAX_LINES_WAITING = 10_000


class LogQueueHandler(logging.handlers.QueueHandler):
    """Passes records to the writing thread unformatted; the text is formatted there.

    A blocked terminal, or a pipe without a reader, blocks that thread and no request; records that
    exceed the queue are dropped.
    """

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record itself: its message does not change any more."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Drop the record if the queue is full."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor from one thread; lines that cannot be written are dropped.

    It has no lock and no buffer that could block the end of the process.
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.formatter, self._fd = formatter, fd

    def createLock(self) -> None:  # noqa: N802
        """Use no lock: only one thread writes."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit without the lock that newer versions of Python take here."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Write the whole line, in as many calls as needed."""
        line = f"{self.format(record)}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._fd, line) :]


@contextlib.contextmanager
def write_in_thread(name: str, format: str) -> Iterator[None]:
    """Write the lines of the logger `name` to stderr in a thread; flush at the end.

    It is meant for frequent lines, such as one per request.
    """
    logger, lines = logging.getLogger(name), queue.Queue[logging.LogRecord](MAX_LINES_WAITING)
    handler = LogQueueHandler(lines)
    writer = LogWriter(sys.stderr.fileno(), FORMATTERS[format]())
    listener = logging.handlers.QueueListener(lines, writer)
    logger.addHandler(handler)
    logger.propagate = False
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        stop_listener(listener, lines)


def stop_listener(
    listener: logging.handlers.QueueListener, lines: queue.Queue[logging.LogRecord]
) -> None:
    """Write the queued lines for at most a second, because there may be no reader.

    If the queue is full its oldest line is replaced by the end marker.
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
