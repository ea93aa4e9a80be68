"""Keys that operators make through POST /keys: their rows, and what each may use.

The ledger's file keeps a row with the key's SHA-256; the key itself is in one answer and nowhere
else. Such a key is never an operator's or a gateway's. Keys of the key file are that file's: no
route changes them, and a row there with the name of a made key comes before it.
"""

import asyncio
import datetime
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.core.errors import RequestError, UsageError
from headway.core.service import KeyLimits
from headway.edge.key_file import KeyRow, check_row
from headway.gateway.config import BudgetRow

MAX_KEYS, MAX_MODELS = 1000, 100
DAY_S = 86_400.0


class NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /keys."""

    name: str
    team: str = ""
    models: Annotated[tuple[str, ...], Meta(max_length=MAX_MODELS)] = ()
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None
    budget: BudgetRow | None = None
    limits: KeyLimits = KeyLimits()


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """Key that was made: times in seconds since 1970; no `models` are all."""

    name: str
    sha256: str
    team: str = ""
    models: tuple[str, ...] = ()
    expires_at: float | None = None
    budget: BudgetRow | None = None
    limits: KeyLimits = KeyLimits()
    made_at: float = 0.0

    @property
    def key_row(self) -> KeyRow:
        """Return its row as the keyring takes it."""
        return KeyRow(name=self.name, sha256=self.sha256, limits=self.limits)

    def public(self) -> dict[str, Any]:
        """Return what operators may read of it: all but the hash, times in ISO 8601."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        del content["sha256"]
        for name in ("made_at", "expires_at"):
            if content[name] is not None:
                moment = datetime.datetime.fromtimestamp(content[name], datetime.UTC)
                content[name] = moment.isoformat(timespec="seconds")
        return content


def row_of(body: NewKey, sha256: str, now_s: float) -> MadeKey:
    """Return the row of a new key."""
    days = body.expires_in_days
    return MadeKey(
        name=body.name,
        sha256=sha256,
        team=body.team,
        models=body.models,
        expires_at=None if days is None else now_s + days * DAY_S,
        budget=body.budget,
        limits=body.limits,
        made_at=now_s,
    )


@dataclass(slots=True)
class MadeKeys:
    """All made keys by name. `changing` is held while one is made or deleted."""

    rows: dict[str, MadeKey] = field(default_factory=dict)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_new(self, row: MadeKey, names: Collection[str], teams: Collection[str]) -> None:
        """Raise RequestError for a bad name, one of `names` that others have, an unknown team."""
        try:
            check_row("name", row.key_row)
        except UsageError as error:
            raise RequestError(error.cause, param="name", code="invalid_value") from error
        if row.name in {*self.rows, *names, "*"} or "/" in row.name:
            text = f"Another key has the name {row.name!r}, or it has a slash."
            raise RequestError(text, param="name", code="invalid_value", status=409)
        self._check_room()
        if row.team and row.team not in teams:
            raise RequestError(
                f"There is no team {row.team[:64]!r}; the file has {', '.join(teams) or 'none'}.",
                param="team",
                code="invalid_value",
            )

    def _check_room(self) -> None:
        if len(self.rows) >= MAX_KEYS:
            raise RequestError(f"There are {MAX_KEYS:,} keys; delete some.", status=409)

    def models_of(self, owner: str) -> tuple[str, ...]:
        """Return the only models that a key may use; () for all."""
        row = self.rows.get(owner)
        return row.models if row is not None else ()

    def check_use(self, owner: str, names: Collection[str], teams: Collection[str]) -> None:
        """Raise RequestError 403 for a model, of these `names`, that the key may not use.

        A key of a team that the file no longer has is refused, or it would spend without a budget.
        """
        row = self.rows.get(owner)
        if row is None:
            return
        if row.models and not {*names} & {*row.models}:
            text = f"This key may not use this model; it may use {', '.join(row.models)}."
            raise RequestError(text, param="model", code="model_not_allowed", status=403)
        if row.team and row.team not in teams:
            raise RequestError(
                f"The team {row.team!r} of this key is not in the gateway's file any more.",
                code="permission_denied",
                status=403,
            )
