"""How long a stream waits: for its first token, and for whatever is next.

    first_token is over ─┬─ the retry budget has room ─► this attempt ends, another is asked
                         └─ it has none ───────────────► looked at again soon: late is better than
                                                         an error

Time in which this process itself stood still is not the upstream's: what has come meanwhile is read
first. Nor is time in which a client, or a score, keeps a stream waiting its upstream's silence.
"""

import asyncio
from math import inf

from headway.gateway.breaker import RetryBudget

LOOK_S = 0.25
STOOD_STILL_S = 0.05
"""A timer that fires so late says that the event loop was held up."""


class Patience:
    """Ends `limit` when the first token is `seconds` late, as soon as `budget` has room."""

    def __init__(self, limit: asyncio.Timeout, budget: RetryBudget, seconds: float) -> None:
        self._limit = limit
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s
        if late_s < STOOD_STILL_S and self._budget.has_room:
            self._limit.reschedule(now_s)
            return
        self._due_s = now_s + max(late_s, LOOK_S)
        self._timer = self._loop.call_at(self._due_s, self._look)

    def end(self) -> None:
        """The first token is here, or nobody waits for it; safe to call twice."""
        self._timer.cancel()


class Silence:
    """Ends `limit` when an upstream has said nothing for `seconds` while it is listened to.

    One timer for a whole stream: it looks at `since_s`, which whoever reads sets before each read,
    and to infinity behind it.
    """

    __slots__ = ("_limit", "_loop", "_seconds", "_timer", "since_s")

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.since_s = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = self.since_s + self._seconds
        if now_s >= due_s:
            if not self._limit.expired():
                self._limit.reschedule(now_s)
            return
        next_s = now_s + self._seconds if due_s == inf else due_s
        self._timer = self._loop.call_at(next_s, self._look)

    def __enter__(self) -> "Silence":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
