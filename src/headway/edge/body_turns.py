"""Whose long body is read on: one at a time, users in turn, the oldest body of each first.

Bodies that are read side by side are complete at once, and lie in memory meanwhile. A body whose
turn has not come stays in its socket, and its client waits. A turn lasts until a piece has come;
who has sent nothing loses it after `ROUNDS` of the event loop, so that a slow body delays no other:

    a1 a2 b1 wait          a1, b1, a1, b1, … until one is whole, then a2 in its place
    a1 has sent nothing    a2, b1, a2, … until it has

No turn comes while a body is parsed, and none of a user who has made work ahead.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

ROUNDS = 4
"""What lies in a socket is here by then: the reader woken, the socket read, the reader woken."""


class BodyTurns:
    """The long bodies that wait to be read on: user → (number, turn), a heap."""

    def __init__(self, is_busy: Callable[[], bool], has_room: Callable[[str], bool]) -> None:
        """`is_busy` keeps all waiting, `has_room` a user; who changes them calls `go_on`."""
        self._is_busy = is_busy
        self._has_room = has_room
        self._waiting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._numbers = count()
        self._reader: int | None = None
        self._rounds = 0
        self._is_due = False

    def number(self) -> int:
        """The number of a body that has become long: an older one has a lower number."""
        return next(self._numbers)

    async def wait(self, user: str, number: int) -> None:
        """Return when the body `number` of `user` may take its next piece."""
        if self._reader == number:  # its piece has come
            self._reader = None
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(user, []), (number, turn))
        self.go_on()
        await turn

    def go_on(self) -> None:
        """Look in the next round of the event loop whose turn it is."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._is_due = False
        if self._is_busy():
            return
        if self._reader is not None and self._rounds < ROUNDS:
            self._rounds += 1
        elif not self._give():
            return
        self.go_on()

    def _give(self) -> bool:
        """Give the turn to the next user's oldest body; False when no body may have it."""
        self._reader = None
        for user in list(self._waiting):
            if not self._has_room(user):
                continue
            bodies = self._waiting.pop(user)
            while bodies and self._reader is None:
                number, turn = heapq.heappop(bodies)
                if not turn.done():  # else its request has ended
                    turn.set_result(None)
                    self._reader, self._rounds = number, 0
            if bodies:
                self._waiting[user] = bodies  # behind the others
            if self._reader is not None:
                return True
        return False
