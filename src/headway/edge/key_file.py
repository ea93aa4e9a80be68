"""The key file: its rows read, and a new one added so that no reader ever sees half a file.

Given a path it reads rows of names and hashes, or adds one: under a lock on the folder, to a copy
that takes the file's place when it is complete and can be read. The keys themselves are nowhere.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import UsageError
from headway.core.principal import ANONYMOUS
from headway.core.regular_file import read_text
from headway.core.service import Limits
from headway.core.yaml_file import parse_yaml, read_yaml

KEY_BYTES = 32
HOW = "`headway key NAME --file FILE` makes a new key and adds its row."
ANOTHER = "Name another file: `headway key NAME --file FILE` makes one that is not there."


class KeyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of the key file: one key."""

    name: str
    sha256: str
    service_class: str | None = msgspec.field(default=None, name="class")
    classes: tuple[str, ...] | None = None
    admin: bool = False
    gateway: bool = False
    revoked: bool = False
    """Whether the key is refused; its row says whose KV blocks are to be forgotten."""
    weight: float | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.weight is not None and not 0.001 <= self.weight <= 1000:
            raise ValueError("weight must be between 0.001 and 1000")
        if self.classes is not None and not self.classes:
            raise ValueError("classes must name one at least; leave it out to allow any")
        if self.classes and self.service_class not in (None, *self.classes):
            raise ValueError(f"class is {self.service_class!r}, which classes does not name")


def digest(key: str) -> bytes:
    """sha256 of a key, so that comparing takes the same time whatever the lengths are."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_key() -> str:
    """A new key: hw- and 256 random bits."""
    return "hw-" + secrets.token_urlsafe(KEY_BYTES)


# ── reading ─────────────────────────────────────────────────────────────────────────────────


def read_rows(file: Path) -> list[KeyRow]:
    """The rows of a key file; UsageError names what is wrong with it."""
    return rows_of(read_yaml(file, "--key-file", HOW), f"--key-file {file}")


def rows_of(content: Any, where: str) -> list[KeyRow]:
    """The rows in the content of a file; raises UsageError, which begins with `where`."""
    if not isinstance(content, dict) or "keys" not in content:
        raise UsageError(f"{where}: it has no `keys:`, so it is no key file.", ANOTHER)
    try:
        rows = msgspec.convert(content["keys"], list[KeyRow])
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error)[:200]}.", HOW) from error
    for row in rows:
        check_row(where, row)
    return rows


def check_row(where: str, row: KeyRow) -> None:
    """Raise UsageError for a row whose hash or name cannot be."""
    hexadecimal = len(row.sha256) == 64 and all(c in "0123456789abcdef" for c in row.sha256)
    if not hexadecimal:
        raise UsageError(f"{where}: sha256 of {row.name!r} is no hash: 64 digits 0-9a-f.", HOW)
    readable = row.name.isprintable() and 0 < len(row.name) <= 64
    if not readable or row.name == ANONYMOUS:
        raise UsageError(f"{where}: {row.name[:64]!r} cannot be a key's name.", HOW)


# ── writing ─────────────────────────────────────────────────────────────────────────────────


def new_row(name: str, key: str, *, admin: bool = False) -> KeyRow:
    """The row of a new key; raises UsageError for a bad name."""
    row = KeyRow(name=name, sha256=digest(key).hex(), admin=admin)
    check_row("headway key", row)
    return row


def row_text(name: str, key: str, *, admin: bool = False) -> str:
    """The row of a key file for `key`, as YAML."""
    quoted: Any = msgspec.json.encode(name).decode()
    right = "    admin: true\n" if admin else ""
    return f"  - name: {quoted}\n    sha256: '{digest(key).hex()}'\n{right}"


def add_row(file: Path, name: str, key: str, *, admin: bool = False) -> None:
    """Add the row of a new key at the end of a key file, or make the file; raises UsageError.

    A new file may be read by its owner alone; one that is there keeps its owner and its mode, less
    what everybody else may do.
    """
    file, row = file.resolve(), new_row(name, key, admin=admin)
    with file_errors(file), locked(file.parent):
        text = read_text(file) if file.exists() else ""
        where = f"--file {file}"
        content = parse_yaml(text, where, HOW)
        rows = [] if is_empty(content) else rows_of(content, where)
        if any(row.name == name for row in rows):
            raise UsageError(
                f"{where}: there is a key {name!r} already.",
                "Choose another name, or delete its row first.",
            )
        longer = with_row(text, row_text(name, key, admin=admin), has_rows=bool(rows))
        if not holds(longer, [*rows, row]):
            raise UsageError(
                f"{where}: a row cannot be added at its end.",
                "Make `keys:` the last of the file, one `- name: …` below the other.",
            )
        replace_file(file, longer)


def revoke_row(file: Path, name: str) -> None:
    """Put `revoked: true` into the row of `name`; raises UsageError."""
    file = file.resolve()
    with file_errors(file), locked(file.parent):
        text, where = read_text(file), f"--file {file}"
        rows = rows_of(parse_yaml(text, where, HOW), where)
        target = next((row for row in rows if row.name == name), None)
        if target is None:
            names = ", ".join(row.name for row in rows if not row.revoked)
            raise UsageError(f"{where}: there is no key {name[:64]!r}.", f"Its keys: {names}.")
        if target.revoked:
            return
        expected = [
            msgspec.structs.replace(row, revoked=True) if row is target else row for row in rows
        ]
        longer = with_revoked(text, target.sha256)
        if not holds(longer, expected):
            raise UsageError(
                f"{where}: the row of {name!r} is not written as one line for each field.",
                "Put `revoked: true` into it yourself, and send the server SIGHUP.",
            )
        replace_file(file, longer)


def with_revoked(text: str, sha256: str) -> str:
    """`text` and `revoked: true` behind the line of this hash, as far to the right as that.

    >>> with_revoked("  - name: a\\n    sha256: 'ab'\\n", "ab")
    "  - name: a\\n    sha256: 'ab'\\n    revoked: true\\n"
    """
    line = re.compile(rf"^( *)(- )?sha256: *['\"]?{sha256}['\"]? *(#.*)?$", re.MULTILINE)

    def more(match: re.Match[str]) -> str:
        space = match[1] + " " * len(match[2] or "")
        return f"{match[0]}\n{space}revoked: true"

    return line.sub(more, text, count=1)


def is_empty(content: Any) -> bool:
    """Whether a file has nothing in it, or nothing below `keys:`."""
    return content is None or (isinstance(content, dict) and content.get("keys", ()) is None)


def with_row(text: str, row: str, *, has_rows: bool) -> str:
    """`text` and the row behind it, as far to the right as the rows before."""
    if text and not text.endswith("\n"):
        text += "\n"
    if has_rows:
        first = next((line for line in text.splitlines() if line.lstrip().startswith("- ")), "")
        space = first[: len(first) - len(first.lstrip())]
        return text + textwrap.indent(textwrap.dedent(row), space)
    head = "" if any(line.startswith("keys:") for line in text.splitlines()) else "keys:\n"
    return text + head + row


def holds(text: str, rows: list[KeyRow]) -> bool:
    """Whether a key file of this text has exactly these rows."""
    try:
        return rows_of(parse_yaml(text, ""), "") == rows
    except UsageError:
        return False


def replace_file(file: Path, text: str) -> None:
    """Put `text` in the place of a file, all at once."""
    descriptor, part = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            if file.exists():
                was = file.stat()
                with contextlib.suppress(PermissionError):
                    os.fchown(target.fileno(), was.st_uid, was.st_gid)
                os.fchmod(target.fileno(), was.st_mode & 0o660)
            target.write(text)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, file)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two of us do not each add to what the other has not seen."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """Raise OSError and UnicodeDecodeError of the body as UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--file {file}: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--file {file} is not UTF-8.", HOW) from error
