"""Circuit breaker of an upstream, and the retry budget of the gateway.

closed ─ 5 consecutive failures, or half of 10 or more requests in 10 s ─► open
open ─ its time is over, or a health check succeeds ─► half open: one request
half open ─ it succeeds ─► closed        ─ it fails ─► open, twice as long
"""

from collections import deque

from headway.core.clock import Clock

CONSECUTIVE_FAILURES, WINDOW_S, MIN_REQUESTS, FAILURE_RATE = 5, 10.0, 10, 0.5
OPEN_S, MAX_OPEN_S = 1.0, 30.0


class Breaker:
    """Circuit breaker of one upstream."""

    __slots__ = (
        "_clock",
        "_has_trial",
        "_num_consecutive",
        "_open_s",
        "_open_until_s",
        "_recent",
        "num_opened",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, bool]] = deque()
        self._num_consecutive = 0
        self._open_until_s: float | None = None
        self._open_s = OPEN_S
        self._has_trial = False
        self.num_opened = 0

    @property
    def state(self) -> str:
        """Return "closed", "open" or "half open"."""
        if self._open_until_s is None:
            return "closed"
        return "open" if self._clock.now_s() < self._open_until_s else "half open"

    @property
    def allows(self) -> bool:
        """Return whether a request may be sent now."""
        state = self.state
        return state == "closed" or (state == "half open" and not self._has_trial)

    def begin(self) -> None:
        """Record a request; a half-open breaker allows no second one."""
        if self._open_until_s is not None:
            self._has_trial = True

    def succeeded(self) -> None:
        self._has_trial = False
        self._num_consecutive = 0
        if self._open_until_s is not None:
            self._recent.clear()
        self._open_until_s, self._open_s = None, OPEN_S
        self._note(True)

    def failed(self) -> None:
        """Record a failure of the upstream: no connection, timeout, 5xx, a broken stream."""
        self._num_consecutive += 1
        self._note(False)
        if self._open_until_s is not None:
            if self._has_trial:
                self._open_s = min(2 * self._open_s, MAX_OPEN_S)
                self._open()
            self._has_trial = False
            return
        bad = sum(not good for _, good in self._recent)
        many = len(self._recent) >= MIN_REQUESTS and bad >= FAILURE_RATE * len(self._recent)
        if self._num_consecutive >= CONSECUTIVE_FAILURES or many:
            self._open()

    def record_abort(self) -> None:
        """Record an outcome that says nothing of the upstream: client disconnected, a 4xx."""
        self._has_trial = False

    def allow_trial(self) -> None:
        """Half-open the breaker after a health check succeeded."""
        if self._open_until_s is not None:
            self._open_until_s = min(self._open_until_s, self._clock.now_s())

    def _open(self) -> None:
        self._open_until_s = self._clock.now_s() + self._open_s
        self.num_opened += 1

    def _note(self, good: bool) -> None:
        now_s = self._clock.now_s()
        self._recent.append((now_s, good))
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()

    def check_integrity(self) -> None:
        """Check that only a breaker that is not closed has a trial request."""
        assert not (self._has_trial and self._open_until_s is None)
        assert OPEN_S <= self._open_s <= MAX_OPEN_S


class RetryBudget:
    """Limit of retries: a tenth of the requests of the last 10 s, plus 3.

    It bounds the load that retries add to upstreams during an outage.
    """

    def __init__(self, clock: Clock, *, share: float = 0.1, least: int = 3) -> None:
        self._clock = clock
        self._share, self._least = share, least
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        """Count a new request."""
        self._requests.append(self._clock.now_s())

    @property
    def has_room(self) -> bool:
        """Return whether the budget allows a retry now."""
        since_s = self._clock.now_s() - WINDOW_S
        for times in (self._requests, self._retries):
            while times and times[0] < since_s:
                times.popleft()
        return len(self._retries) < self._share * len(self._requests) + self._least

    def take(self) -> bool:
        """Return whether the budget allows a retry now, and count it if so."""
        if not self.has_room:
            return False
        self._retries.append(self._clock.now_s())
        return True
