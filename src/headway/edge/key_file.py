"""Key file: reading its rows, and adding or revoking one atomically.

A row has a name and a hash; the keys themselves are stored nowhere. A change is written under a
lock on the folder, to a copy that replaces the file when it is complete and valid.
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
from headway.core.service import KeyLimits
from headway.core.yaml_file import parse_yaml, read_yaml

KEY_BYTES = 32
FIX_HINT = "`headway key NAME --file FILE` makes a new key and adds its row."
OTHER_FILE_HINT = "Name another file: `headway key NAME --file FILE` makes one that is not there."


class KeyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of the key file: one key."""

    name: str
    sha256: str
    service_class: str | None = msgspec.field(default=None, name="class")
    classes: tuple[str, ...] | None = None
    admin: bool = False
    gateway: bool = False
    revoked: bool = False
    """Whether the key is refused; the row then says whose KV blocks are to be dropped."""
    weight: float | None = None
    limits: KeyLimits = KeyLimits()

    def __post_init__(self) -> None:
        if self.weight is not None and not 0.001 <= self.weight <= 1000:
            raise ValueError("weight must be between 0.001 and 1000")
        if self.classes is not None and not self.classes:
            raise ValueError("classes must name one at least; leave it out to allow any")
        if self.classes and self.service_class not in (None, *self.classes):
            raise ValueError(f"class is {self.service_class!r}, which classes does not name")


def digest(key: str) -> bytes:
    """Return the SHA-256 of a key, so that a comparison takes the same time for any length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_key() -> str:
    """Return a new key: "hw-" and 256 random bits."""
    return "hw-" + secrets.token_urlsafe(KEY_BYTES)


# ── reading ─────────────────────────────────────────────────────────────────────────────────


def read_rows(file: Path) -> list[KeyRow]:
    """Read the rows of a key file; UsageError names what is wrong with it."""
    return rows_of(read_yaml(file, "--key-file", FIX_HINT), f"--key-file {file}")


def rows_of(content: Any, where: str) -> list[KeyRow]:
    """Return the rows in a file's content; raises UsageError, which begins with `where`."""
    if not isinstance(content, dict) or "keys" not in content:
        raise UsageError(f"{where}: it has no `keys:`, so it is no key file.", OTHER_FILE_HINT)
    try:
        rows = msgspec.convert(content["keys"], list[KeyRow])
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error)[:200]}.", FIX_HINT) from error
    for row in rows:
        check_row(where, row)
    return rows


def check_row(where: str, row: KeyRow) -> None:
    """Raise UsageError for a row with an invalid hash or name."""
    hexadecimal = len(row.sha256) == 64 and all(c in "0123456789abcdef" for c in row.sha256)
    if not hexadecimal:
        raise UsageError(f"{where}: sha256 of {row.name!r} is no hash: 64 digits 0-9a-f.", FIX_HINT)
    readable = row.name.isprintable() and 0 < len(row.name) <= 64
    if not readable or row.name == ANONYMOUS:
        raise UsageError(f"{where}: {row.name[:64]!r} cannot be a key's name.", FIX_HINT)


# ── writing ─────────────────────────────────────────────────────────────────────────────────


def new_row(name: str, key: str, *, admin: bool = False, gateway: bool = False) -> KeyRow:
    """Return the row of a new key; raises UsageError for a bad name."""
    row = KeyRow(name=name, sha256=digest(key).hex(), admin=admin, gateway=gateway)
    check_row("headway key", row)
    return row


def row_text(name: str, key: str, *, admin: bool = False, gateway: bool = False) -> str:
    """Return the row of `key` as YAML text."""
    quoted: Any = msgspec.json.encode(name).decode()
    rights = "".join(
        f"    {right}: true\n" for right, has in (("admin", admin), ("gateway", gateway)) if has
    )
    return f"  - name: {quoted}\n    sha256: '{digest(key).hex()}'\n{rights}"


def add_row(file: Path, name: str, key: str, *, admin: bool = False, gateway: bool = False) -> None:
    """Append the row of a new key to a key file, or create the file; raises UsageError.

    A new file is readable by its owner only. An existing one keeps its owner and its mode, without
    the rights of others.
    """
    file, row = file.resolve(), new_row(name, key, admin=admin, gateway=gateway)
    with file_errors(file), folder_lock(file.parent):
        text = read_text(file) if file.exists() else ""
        where = f"--file {file}"
        content = parse_yaml(text, where, FIX_HINT)
        rows = [] if is_empty(content) else rows_of(content, where)
        if any(row.name == name for row in rows):
            raise UsageError(
                f"{where}: there is a key {name!r} already.",
                "Choose another name, or delete its row first.",
            )
        new_text = row_text(name, key, admin=admin, gateway=gateway)
        longer = with_row(text, new_text, has_rows=bool(rows))
        if not has_exactly_rows(longer, [*rows, row]):
            raise UsageError(
                f"{where}: a row cannot be added at its end.",
                "Make `keys:` the last of the file, one `- name: …` below the other.",
            )
        replace_file(file, longer)


def revoke_row(file: Path, name: str) -> None:
    """Add `revoked: true` to the row of `name`; raises UsageError."""
    file = file.resolve()
    with file_errors(file), folder_lock(file.parent):
        text, where = read_text(file), f"--file {file}"
        rows = rows_of(parse_yaml(text, where, FIX_HINT), where)
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
        if not has_exactly_rows(longer, expected):
            raise UsageError(
                f"{where}: the row of {name!r} is not written as one line for each field.",
                "Put `revoked: true` into it yourself, and send the server SIGHUP.",
            )
        replace_file(file, longer)


def with_revoked(text: str, sha256: str) -> str:
    """Return `text` with `revoked: true` after the line of this hash, indented alike.

    >>> with_revoked("  - name: a\\n    sha256: 'ab'\\n", "ab")
    "  - name: a\\n    sha256: 'ab'\\n    revoked: true\\n"
    """
    line = re.compile(rf"^( *)(- )?sha256: *['\"]?{sha256}['\"]? *(#.*)?$", re.MULTILINE)

    def more(match: re.Match[str]) -> str:
        space = match[1] + " " * len(match[2] or "")
        return f"{match[0]}\n{space}revoked: true"

    return line.sub(more, text, count=1)


def is_empty(content: Any) -> bool:
    """Return whether a file is empty, or has nothing below `keys:`."""
    return content is None or (isinstance(content, dict) and content.get("keys", ()) is None)


def with_row(text: str, row: str, *, has_rows: bool) -> str:
    """Return `text` with the row at its end, indented like the rows before."""
    if text and not text.endswith("\n"):
        text += "\n"
    if has_rows:
        first = next((line for line in text.splitlines() if line.lstrip().startswith("- ")), "")
        space = first[: len(first) - len(first.lstrip())]
        return text + textwrap.indent(textwrap.dedent(row), space)
    head = "" if any(line.startswith("keys:") for line in text.splitlines()) else "keys:\n"
    return text + head + row


def has_exactly_rows(text: str, rows: list[KeyRow]) -> bool:
    """Return whether a key file with this text has exactly these rows."""
    try:
        return rows_of(parse_yaml(text, ""), "") == rows
    except UsageError:
        return False


def replace_file(file: Path, text: str) -> None:
    """Replace the content of a file atomically."""
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
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two processes do not overwrite each other's row."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """Convert OSError and UnicodeDecodeError of the body to UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--file {file}: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--file {file} is not UTF-8.", FIX_HINT) from error
