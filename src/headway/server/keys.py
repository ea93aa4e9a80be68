"""Who has a key: names, classes and limits by key, the keys themselves only as hashes.

Given `--api-key` values and a key file it finds the owner of what a client sent, in a time that
does not depend on which key it resembles. It promises that no key is kept in memory or on disk, and
that a file that cannot be read changes nothing while the server runs. A key file is YAML:

    keys:
      - name: alice
        sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
        class: interactive          # of requests that name none
        limits: {requests_at_once: 8, requests_per_minute: 600, tokens_per_minute: 200000}
      - name: operator
        sha256: 0b14d501a594442a01c6859541bcb3e8164d183d32937b851835442f69d5c94e
        weight: 2                   # its share beside other keys; else that of the class
        admin: true                 # may also read /metrics, /stats and /trace

`headway key alice` makes a key of 256 random bits and prints its row. A slow hash would add nothing
to such a key and cost every request.
"""

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.core.clock import Clock, SystemClock
from headway.core.errors import UsageError
from headway.core.principal import ANONYMOUS, Principal
from headway.core.service import Limits
from headway.server.rates import Meter

KEY_BYTES = 32


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the file has it."""

    name: str
    sha256: str
    service_class: str | None = msgspec.field(default=None, name="class")
    admin: bool = False
    weight: float | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.weight is not None and not 0.001 <= self.weight <= 1000:
            raise ValueError("weight must be between 0.001 and 1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a key: who, with which rights.

    `service_class` None means the default, `weight` None that of the request's class.
    """

    principal: Principal
    meter: Meter
    admin: bool = False
    service_class: str | None = None
    weight: float | None = None
    digest: bytes = b""


def anybody() -> Caller:
    """Who asks where there are no keys: everybody, for everything."""
    return Caller(principal=Principal(), meter=Meter(Limits(), SystemClock()), admin=True)


@dataclass(slots=True, kw_only=True)
class Keyring:
    """The callers by key; true when keys are wanted: with neither flags nor a file all may ask."""

    flags: Sequence[str] = ()
    file: Path | None = None
    classes: Collection[str] | None = None
    """Service classes that a key may name; None takes any."""
    share_prefix_cache: bool = False
    """Whether all keys have one salt, so that each finds what the others computed."""
    clock: Clock = field(default_factory=SystemClock)
    callers: list[Caller] = field(default_factory=list)
    nobody: Caller = field(default_factory=anybody)

    def __post_init__(self) -> None:
        self.reload()

    def __bool__(self) -> bool:
        return bool(self.flags) or self.file is not None

    def reload(self) -> None:
        """Read the file again; UsageError, and nothing has changed, when it cannot be used.

        Meters of keys that stay go on, so that reading again is no way around a limit.
        """
        callers = [self._from_flag(number, key) for number, key in enumerate(self.flags, 1)]
        rows = read_rows(self.file) if self.file is not None else []
        callers += [self._from_row(row) for row in rows]
        check_distinct(callers)
        self.callers = callers

    def _from_flag(self, number: int, key: str) -> Caller:
        return self._caller(Row(name=f"api-key-{number}", sha256=digest(key).hex(), admin=True))

    def _from_row(self, row: Row) -> Caller:
        if self.classes is not None and row.service_class not in (None, *self.classes):
            raise UsageError(
                f"{self.file}: key {row.name!r} has the class {row.service_class!r}.",
                f"There are {', '.join(self.classes)}; --slo NAME:… and --classes make others.",
            )
        return self._caller(row)

    def _caller(self, row: Row) -> Caller:
        hashed, limits = bytes.fromhex(row.sha256), row.limits
        salt = "" if self.share_prefix_cache else cache_salt(hashed)
        kept = next((c for c in self.callers if c.digest == hashed), None)
        meter = kept.meter if kept and kept.meter.limits == limits else Meter(limits, self.clock)
        return Caller(
            principal=Principal(row.name, row.service_class or "standard", salt),
            meter=meter,
            admin=row.admin,
            service_class=row.service_class,
            weight=row.weight,
            digest=hashed,
        )

    def find(self, key: str) -> Caller | None:
        """The owner of `key`; each of the keys is compared, in constant time."""
        given, found = digest(key), None
        for caller in self.callers:
            if hmac.compare_digest(given, caller.digest):
                found = caller
        return found


def digest(key: str) -> bytes:
    """sha256 of a key, so that comparing takes the same time whatever the lengths are."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def cache_salt(hashed: bytes) -> str:
    """The salt of a key's blocks: the same after a restart, and of no use to anybody else.

    Nobody can hand in a salt as it is (`Principal.salted`), so it need not be secret; it has to
    differ from all others'.
    """
    return hashlib.sha256(b"cache salt" + hashed).hexdigest()[:32]


def check_distinct(callers: Iterable[Caller]) -> None:
    """Raise UsageError when a key or a name is there twice."""
    digests: set[bytes] = set()
    names: set[str] = set()
    for caller in callers:
        name = caller.principal.name
        if caller.digest in digests or name in names:
            raise UsageError(f"The key {name!r} is there twice.", "Give each its own name.")
        digests.add(caller.digest)
        names.add(name)


def read_rows(file: Path) -> list[Row]:
    """The rows of a key file; UsageError names what is wrong with it."""
    import yaml  # late: start-up prints within 300 ms

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--key-file {file}: {error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--key-file {file} is not YAML.", HOW) from error
    try:
        rows = msgspec.convert((content or {}).get("keys"), list[Row])
    except (msgspec.ValidationError, AttributeError) as error:
        raise UsageError(f"--key-file {file}: {str(error)[:200]}.", HOW) from error
    for row in rows:
        check_row(file, row)
    return rows


def check_row(file: Path, row: Row) -> None:
    """Raise UsageError for a row whose hash or name cannot be."""
    hexadecimal = len(row.sha256) == 64 and all(c in "0123456789abcdef" for c in row.sha256)
    if not hexadecimal:
        raise UsageError(f"{file}: sha256 of {row.name!r} is no hash: 64 digits 0-9a-f.", HOW)
    readable = row.name.isprintable() and 0 < len(row.name) <= 64
    if not readable or row.name == ANONYMOUS:
        raise UsageError(f"{file}: {row.name[:64]!r} cannot be a key's name.", HOW)


HOW = "`headway key NAME` prints a new key and its row for the file."


def make_key() -> str:
    """A new key: hw- and 256 random bits."""
    return "hw-" + secrets.token_urlsafe(KEY_BYTES)


def row_text(name: str, key: str) -> str:
    """The row of a key file for `key`, as YAML."""
    quoted: Any = msgspec.json.encode(name).decode()
    return f"keys:\n  - name: {quoted}\n    sha256: '{digest(key).hex()}'\n"
