"""Turns of long bodies that are being read: one at a time, round-robin over users.

Bodies that are read in parallel all stay in memory until the last piece arrived. So a body without
the turn stays in its socket, and its client waits. A turn lasts until a piece has arrived; a body
that receives nothing loses its turn after `ROUNDS` rounds of the event loop:

    a1 a2 b1 wait          a1, b1, a1, b1, … until one is whole, then a2 in its place
    a1 receives nothing    a2, b1, a2, … until it does

No body has the turn while one is parsed, nor a body of a user with too much work in the queue.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

ROUNDS = 4
"""Rounds after which data in a socket is certainly read: wake the reader, read, wake the reader."""


class BodyTurns:
    """Long bodies that wait for their next piece: user → heap of (number, turn)."""

    def __init__(self, is_busy: Callable[[], bool], has_room: Callable[[str], bool]) -> None:
        """`is_busy` blocks all bodies, `has_room` those of a user; `go_on` follows a change."""
        self._is_busy = is_busy
        self._has_room = has_room
        self._waiting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._numbers = count()
        self._reader: int | None = None
        self._rounds = 0
        self._is_due = False

    def number(self) -> int:
        """Return the number of a new long body; older bodies have lower numbers."""
        return next(self._numbers)

    async def wait(self, user: str, number: int) -> None:
        """Return when the body `number` of `user` may read its next piece."""
        if self._reader == number:  # its piece has arrived
            self._reader = None
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(user, []), (number, turn))
        self.go_on()
        await turn

    def go_on(self) -> None:
        """Assign the turn in the next round of the event loop."""
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
        """Give the turn to the next user's oldest body; returns False if no body may have it."""
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
