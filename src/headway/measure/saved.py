"""Reports as files that `--json` has written."""

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from headway.core.errors import UsageError
from headway.core.regular_file import read_bytes


class SavedReport(Protocol):
    """A report with the name of the command that made it: headway-bench, headway-eval."""

    format: str


MAX_REPORT_BYTES = 2**31
"""Largest report that is read; one with every request of a long run is large."""
Report = TypeVar("Report", bound=SavedReport)


def read_saved(path: str, kind: type[Report], command: str) -> Report:
    """Return the `kind` in a file of `headway COMMAND`; UsageError names what is wrong with the
    file."""
    try:
        data = read_bytes(Path(path), MAX_REPORT_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
    try:
        report = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no report of headway {command}: {error}.", "Write one with --json."
        ) from error
    if report.format != f"headway-{command}":
        raise UsageError(f"{path} is a {report.format}, no report of headway {command}.")
    return report


def write(path: str, data: bytes) -> None:
    """Write a file; raise UsageError where that fails."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
