"""Log lines that nobody can forge: one event is one line, whatever a client has sent.

Given a level and a format it sets up the root logger of a process. It promises that line breaks,
escape sequences and characters that turn text around come out escaped ("\\n", "\\x1b[2J"), in the
message and in what an exception says; a traceback follows its line indented, or in JSON as a field.
"""

import logging
import sys
import unicodedata
from typing import TextIO

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
    """2026-11-21 10:00:00,123 WARNING headway.server.app ignored unknown fields: colour."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname} {record.name} "
        line += plain(record.getMessage())
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n    ".join([line, *map(plain, trace.split("\n"))]) if trace else line


class JsonFormatter(logging.Formatter):
    """{"time": 1795255200.123, "level": "warning", "logger": …, "message": …, "trace": …}."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": plain(record.getMessage()),
        }
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            content["trace"] = [plain(line) for line in lines]
        return msgspec.json.encode(content).decode()


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
