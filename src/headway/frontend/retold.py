"""What every engine that is started later is told again: who is forgotten, and changed settings."""

from collections.abc import Iterator

from headway.core.live_settings import Changes
from headway.engine import messages

MAX_FORGOTTEN = 10_000
"""Owners that the next engine is told to forget again; of more the newest."""


class Retold:
    """All that was told so far and is still to hold."""

    def __init__(self) -> None:
        self._forgotten: dict[bytes, None] = {}
        self._changes: Changes = {}

    def forget(self, owner: bytes) -> messages.Forget:
        """Keep that `owner` is forgotten; the message of it."""
        self._forgotten.pop(owner, None)
        self._forgotten[owner] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.pop(next(iter(self._forgotten)))
        return messages.Forget(owner)

    def change(self, changes: Changes) -> messages.Change:
        """Keep that these settings are changed; the message of it."""
        self._changes |= changes
        return messages.Change(changes)

    def again(self) -> Iterator[messages.Forget | messages.Change]:
        """For an engine that has just begun: the one before may have died over it."""
        for owner in self._forgotten:
            yield messages.Forget(owner)
        if self._changes:
            yield messages.Change(self._changes)
