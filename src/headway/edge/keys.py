"""Keys: names, service classes and limits by key; the keys themselves only as hashes.

The keyring has `--api-key` values and the rows of a key file. It finds the owner of a key in a time
that does not depend on which key it resembles. No key is kept in memory or on disk, and a file that
cannot be read changes nothing while the server runs. A key file is YAML:

    keys:
      - name: alice
        sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
        class: interactive          # of requests that state none
        classes: [interactive, batch]   # that its requests may state; without it any
        limits: {requests_at_once: 8, requests_per_minute: 600, tokens_per_minute: 200000}
      - name: operator
        sha256: 0b14d501a594442a01c6859541bcb3e8164d183d32937b851835442f69d5c94e
        weight: 2                   # its share relative to other keys; else that of the class
        admin: true                 # may also read /metrics, /stats and /trace
      - name: gateway
        sha256: 1f3870be274f6c49b3e31a0c6728957f8ab3fa6b4a1d2b1a1f0d1a6c7b5c2d3e
        gateway: true               # may ask on behalf of users: `headway gateway` has this key

`headway key alice --file keys.yaml` makes a key of 256 random bits and adds its row; `headway key
revoke alice --file keys.yaml` adds `revoked: true` to it. A slow hash would not protect such a key
better, and would delay every request.
"""

import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError, UsageError
from headway.core.principal import Principal
from headway.core.service import BATCH_CLASS, KeyLimits
from headway.edge.key_file import KeyRow, digest, read_rows
from headway.edge.rates import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Owner of a key and its rights.

    `service_class` None means the default, `weight` None that of the request's class, `classes`
    None that its requests may state any class. `in_batch` is true for lines of its batches,
    `gateway` for the key of a gateway, which asks on behalf of users.
    """

    principal: Principal
    meter: Meter
    admin: bool = False
    service_class: str | None = None
    classes: Collection[str] | None = None
    weight: float | None = None
    digest: bytes = b""
    in_batch: bool = False
    gateway: bool = False
    expires_at_s: float | None = None
    """Wall-clock time from which on its key is refused."""

    @property
    def relays(self) -> bool:
        """Return whether it may use a gateway's fields (`edge/relayed.py`)."""
        return self.gateway or self.admin

    def for_user(self, name: str) -> "Caller":
        """Return the caller of a gateway's user, with a cache salt of its own."""
        mixed = self.principal.salted(f"user {name}")
        principal = msgspec.structs.replace(
            mixed, name=f"{mixed.name}/{name}", cache_owner=f"{mixed.cache_owner} {name}"
        )
        return replace(self, principal=principal, admin=False, gateway=True)

    def may_use(self, service_class: str) -> bool:
        """Return whether its requests may be of this class.

        A batch may use another class than `batch` only if the operator's row lists it.
        """
        if self.in_batch:
            named = service_class in (self.classes or ())
            return service_class == BATCH_CLASS or named or self.admin
        return self.classes is None or service_class in self.classes

    def for_lines(self, principal: Principal) -> "Caller":
        """Return the caller of the lines of its batches."""
        return replace(self, principal=principal, service_class=BATCH_CLASS, in_batch=True)


def anonymous_caller() -> Caller:
    """Return the caller of a server without keys, which has all rights."""
    return Caller(principal=Principal(), meter=Meter(KeyLimits(), SystemClock()), admin=True)


@dataclass(slots=True, kw_only=True)
class Keyring:
    """Callers by key; true if keys are required, that is with flags or a file."""

    flags: Sequence[str] = ()
    file: Path | None = None
    classes: Collection[str] | None = None
    """Service classes that a key may state; None for any."""
    share_prefix_cache: bool = False
    """Whether all keys share one salt, so that each finds the cached prefixes of the others."""
    clock: Clock = field(default_factory=SystemClock)
    callers: list[Caller] = field(default_factory=list)
    made: list[tuple[KeyRow, float | None]] = field(default_factory=list)
    """Rows of keys that neither flags nor the file have, with the time that they expire at."""
    reserved_names: frozenset[str] = frozenset()
    """Names of the keys of flags and of the file, revoked ones included."""
    revoked: list[Principal] = field(default_factory=list)
    """Principals whose keys are revoked: their KV blocks are to be dropped."""
    anonymous: Caller = field(default_factory=anonymous_caller)
    _rows: list[KeyRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reload()

    def __bool__(self) -> bool:
        return bool(self.flags) or self.file is not None

    def reload(self) -> None:
        """Read the file again; an invalid file raises UsageError and changes nothing."""
        self.use(self.read())

    def read(self) -> list[KeyRow]:
        """Read the rows of the file, for `use`; may run in a thread. Raises UsageError."""
        return read_rows(self.file) if self.file is not None else []

    def use(self, rows: list[KeyRow]) -> None:
        """Use `rows` from the next request on; an invalid row raises UsageError and changes
        nothing.

        A key that stays keeps its meter, so that a reload does not reset its limits.
        """
        callers = [self._from_flag(number, key) for number, key in enumerate(self.flags, 1)]
        entries = [(self._from_row(row), row.revoked) for row in rows]
        check_distinct([*callers, *(caller for caller, _ in entries)])
        names = [caller.principal.name for caller in (*callers, *(each for each, _ in entries))]
        digests = {caller.digest for caller, revoked in entries if revoked}
        made = [self._from_made(row, at_s) for row, at_s in self.made if row.name not in names]
        callers += [caller for caller, revoked in entries if not revoked]
        digests |= {caller.digest for caller in callers}
        self.callers = callers + [caller for caller in made if caller.digest not in digests]
        self.revoked = [caller.principal for caller, revoked in entries if revoked]
        self.reserved_names, self._rows = frozenset(names), rows

    def use_made(self, made: Sequence[tuple[KeyRow, float | None]]) -> None:
        """Use these rows beside those of flags and of the file, which come first."""
        self.made = list(made)
        self.use(self._rows)

    def _from_made(self, row: KeyRow, expires_at_s: float | None) -> Caller:
        return replace(self._caller(row), expires_at_s=expires_at_s)

    def check_age(self, caller: Caller) -> None:
        """Raise RequestError 401 for a key that has expired."""
        if self.is_expired(caller):
            raise RequestError("This API key has expired.", code="key_expired", status=401)

    def is_expired(self, caller: Caller) -> bool:
        """Return whether the caller's key is refused because of its age."""
        return caller.expires_at_s is not None and self.clock.wall_s() >= caller.expires_at_s

    def _from_flag(self, number: int, key: str) -> Caller:
        return self._caller(KeyRow(name=f"api-key-{number}", sha256=digest(key).hex(), admin=True))

    def _from_row(self, row: KeyRow) -> Caller:
        for name in (row.service_class, *(row.classes or ())):
            if self.classes is not None and name not in (None, *self.classes):
                raise UsageError(
                    f"{self.file}: key {row.name!r} has the class {name!r}.",
                    f"There are {', '.join(self.classes)}; --slo NAME:… and --classes make others.",
                )
        return self._caller(row)

    def _caller(self, row: KeyRow) -> Caller:
        hashed, limits = bytes.fromhex(row.sha256), row.limits
        salt = "" if self.share_prefix_cache else cache_salt(hashed)
        previous = next((c for c in self.callers if c.digest == hashed), None)
        meter = (
            previous.meter
            if previous and previous.meter.limits == limits
            else Meter(limits, self.clock)
        )
        usual = row.service_class or next(iter(row.classes or ()), None)
        return Caller(
            principal=Principal(row.name, usual or "standard", salt, cache_salt(hashed)),
            meter=meter,
            admin=row.admin,
            gateway=row.gateway,
            service_class=usual,
            classes=row.classes,
            weight=row.weight,
            digest=hashed,
        )

    def find(self, key: str) -> Caller | None:
        """Return the owner of `key`; every key is compared, in constant time."""
        given, match = digest(key), None
        for caller in self.callers:
            if hmac.compare_digest(given, caller.digest):
                match = caller
        return match

    def named(self, name: str) -> Caller | None:
        """Return the caller of this name; without keys the anonymous one."""
        if not self:
            return self.anonymous
        caller = next((c for c in self.callers if c.principal.name == name), None)
        return None if caller is None or self.is_expired(caller) else caller


def cache_salt(hashed: bytes) -> str:
    """Return the salt of a key's KV blocks, which is the same after a restart.

    No client can state a salt directly (`Principal.salted`), so it need not be secret; it has to
    differ from all other salts.
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
