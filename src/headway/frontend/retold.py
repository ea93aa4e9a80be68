"""What holds from one engine to the next: who is forgotten, which files of the model it reads."""

from collections.abc import Callable, Iterator

from headway.engine import messages

MAX_FORGOTTEN = 10_000
"""Owners that the next engine is told to forget again; of more the newest."""


class Retold:
    """All that was told so far and is still to hold."""

    def __init__(self) -> None:
        self._forgotten: dict[bytes, None] = {}

    def forget(self, owner: bytes) -> messages.ForgetOwner:
        """Keep that `owner` is forgotten; the message of it."""
        self._forgotten.pop(owner, None)
        self._forgotten[owner] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.pop(next(iter(self._forgotten)))
        return messages.ForgetOwner(owner)

    def again(self) -> Iterator[messages.ForgetOwner]:
        """For an engine that has just begun: the one before may have died over it."""
        for owner in self._forgotten:
            yield messages.ForgetOwner(owner)


class FirstStamp:
    """Whether the model's files are still those of the first engine.

    The requests of a dead engine go on in the next, which must be of the same weights.
    """

    def __init__(self, stamp: Callable[[], str]) -> None:
        self._stamp, self._first = stamp, ""

    def are_the_first(self) -> bool:
        """Asked first they are."""
        now = self._stamp()
        self._first = self._first or now
        return now == self._first
