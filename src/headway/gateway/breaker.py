"""Whether an upstream may be asked: after failures it rests, then one request tries it.

closed ─ 5 failures in a row, or half of 10 or more in 10 s ─► open
open ─ the rest is over, or a look found it alive ─► half open: one request
half open ─ it succeeds ─► closed        ─ it fails ─► open, twice as long
"""

from collections import deque

from headway.core.clock import Clock

IN_A_ROW, WINDOW_S, LEAST, SHARE = 5, 10.0, 10, 0.5
REST_S, LONGEST_REST_S = 1.0, 30.0


class Breaker:
    """The breaker of one upstream."""

    __slots__ = (
        "_clock",
        "_in_a_row",
        "_open_until_s",
        "_recent",
        "_rest_s",
        "_trying",
        "num_opened",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, bool]] = deque()
        self._in_a_row = 0
        self._open_until_s: float | None = None
        self._rest_s = REST_S
        self._trying = False
        self.num_opened = 0

    @property
    def state(self) -> str:
        """closed, open or half open."""
        if self._open_until_s is None:
            return "closed"
        return "open" if self._clock.now_s() < self._open_until_s else "half open"

    @property
    def allows(self) -> bool:
        """Whether a request may go there now."""
        state = self.state
        return state == "closed" or (state == "half open" and not self._trying)

    def begin(self) -> None:
        """A request goes there; while it is half open no other follows."""
        if self._open_until_s is not None:
            self._trying = True

    def succeeded(self) -> None:
        self._trying = False
        self._in_a_row = 0
        if self._open_until_s is not None:
            self._recent.clear()
        self._open_until_s, self._rest_s = None, REST_S
        self._note(True)

    def failed(self) -> None:
        """A failure of its making: no connection, no answer in time, 5xx, a broken stream."""
        self._in_a_row += 1
        self._note(False)
        if self._open_until_s is not None:
            if self._trying:
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
                self._open()
            self._trying = False
            return
        bad = sum(not good for _, good in self._recent)
        many = len(self._recent) >= LEAST and bad >= SHARE * len(self._recent)
        if self._in_a_row >= IN_A_ROW or many:
            self._open()

    def given_up(self) -> None:
        """The request ended in a way that tells nothing of it: its client left, a 4xx."""
        self._trying = False

    def revive(self) -> None:
        """A look from outside found it alive: the rest is over."""
        if self._open_until_s is not None:
            self._open_until_s = min(self._open_until_s, self._clock.now_s())

    def _open(self) -> None:
        self._open_until_s = self._clock.now_s() + self._rest_s
        self.num_opened += 1

    def _note(self, good: bool) -> None:
        now_s = self._clock.now_s()
        self._recent.append((now_s, good))
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()

    def check_integrity(self) -> None:
        """A trial is of a breaker that is not closed."""
        assert not (self._trying and self._open_until_s is None)
        assert REST_S <= self._rest_s <= LONGEST_REST_S


class RetryBudget:
    """Attempts beyond the first: a tenth of the requests of the last 10 s, and 3.

    Whatever fails, upstreams get at most so much more than clients send.
    """

    def __init__(self, clock: Clock, *, share: float = 0.1, least: int = 3) -> None:
        self._clock = clock
        self._share, self._least = share, least
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        """A request has come."""
        self._requests.append(self._clock.now_s())

    @property
    def has_room(self) -> bool:
        """Whether one may be tried again now."""
        since_s = self._clock.now_s() - WINDOW_S
        for times in (self._requests, self._retries):
            while times and times[0] < since_s:
                times.popleft()
        return len(self._retries) < self._share * len(self._requests) + self._least

    def take(self) -> bool:
        """Whether one may be tried again; True counts it."""
        if not self.has_room:
            return False
        self._retries.append(self._clock.now_s())
        return True
