"""Reports as files: what `--json` wrote is read again."""

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from headway.core.errors import UsageError
from headway.core.regular_file import read_bytes


class Saved(Protocol):
    """A report says which command made it: headway-bench, headway-eval."""

    format: str


MOST_BYTES = 2**31
"""Of a report; one with every request of a long run is large."""
Report = TypeVar("Report", bound=Saved)


def read_saved(path: str, kind: type[Report], command: str) -> Report:
    """The `kind` in a file of `headway COMMAND`; UsageError names what is wrong with the file."""
    try:
        data = read_bytes(Path(path), MOST_BYTES)
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
    """A file, or a UsageError."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
