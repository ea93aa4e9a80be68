"""Timeouts of a stream: for its first token, and for the next bytes.

    first_token is over ─┬─ the retry budget has room ─► this attempt ends, another follows
                         └─ it has none ───────────────► checked again soon: late is better than an
                                                         error

Time in which the gateway's event loop was blocked does not count against the upstream, because
bytes that arrived meanwhile are read first. Neither does time in which a client or a scorer delays
the stream.
"""

import asyncio
from math import inf

from headway.gateway.breaker import RetryBudget

RECHECK_S = 0.25
BLOCKED_LOOP_S = 0.05
"""Delay of a timer from which on the event loop counts as blocked."""


class FirstTokenTimeout:
    """Expires `limit` when the first token is `seconds` late, as soon as `budget` has room."""

    def __init__(self, limit: asyncio.Timeout, budget: RetryBudget, seconds: float) -> None:
        self._limit = limit
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s
        if late_s < BLOCKED_LOOP_S and self._budget.has_room:
            self._limit.reschedule(now_s)
            return
        self._due_s = now_s + max(late_s, RECHECK_S)
        self._timer = self._loop.call_at(self._due_s, self._look)

    def end(self) -> None:
        """Stop the timeout; safe to call twice."""
        self._timer.cancel()


class SilenceTimeout:
    """Expires `limit` when an upstream sent nothing for `seconds` while it was read.

    One timer serves a whole stream: it compares `since_s`, which the reader sets before each read,
    and to infinity after it.
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

    def __enter__(self) -> "SilenceTimeout":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
