"""How much one user has had: requests at once, requests and tokens of the last minute.

A `Meter` counts for one key, or for one key in one class. What a request may cost is held when it
enters and settled when it ends, so that no user gets more than a minute's worth at
once, nor more than the rate in the long run.
"""

from headway.core.clock import Clock
from headway.core.errors import RequestError
from headway.core.service import Limits

MAX_RETRY_S = 120.0
SPARED = 0.5
"""The share of a minute's worth that lines of batches leave to the other requests of their key. A
batch goes at the full rate all the same; it is the burst that it does not use up."""
Header = tuple[bytes, bytes]


class Gcra:
    """A rate with a burst of one minute: the generic cell rate algorithm (ITU-T I.371, annex A).

    `due_s` is the moment by which all that was charged is paid off at the rate; it may lie at most
    a minute ahead. What is held counts like what is charged, and is paid off by nothing but being
    settled. 120 a minute, nothing used: 120 may be taken at once; a second later 2 more; with 100
    held 20, until they are settled as 30: 90.
    """

    __slots__ = ("_clock", "_due_s", "_held", "per_minute")

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._due_s, self._held = clock.now_s(), 0

    @property
    def available(self) -> float:
        """Units that may be charged now; below 0 where more was used than was held."""
        unpaid_s = max(0.0, self._due_s - self._clock.now_s())
        return self.per_minute - unpaid_s * self.per_minute / 60 - self._held

    def wait_s(self, count: int) -> float:
        """Seconds until `count` may be taken, if all that is held is used; 0 when it may be now."""
        return max(0.0, count - self.available) * 60 / self.per_minute

    def take(self, count: int) -> None:
        """Charge `count` now."""
        self._due_s = max(self._due_s, self._clock.now_s()) + count * 60 / self.per_minute

    def hold(self, count: int) -> None:
        """Keep `count` free until it is settled."""
        self._held += count

    def settle(self, held: int, used: int) -> None:
        """What was held turned out to be `used`; more than was held is a debt."""
        self._held -= held
        self.take(used)

    def give_back(self, count: int) -> None:
        """Charge `count` less: what was taken was not used after all."""
        self._due_s -= count * 60 / self.per_minute

    def check_integrity(self) -> None:
        """Nothing is held twice, or given back twice."""
        assert self._held >= 0


class Meter:
    """What one user uses of what `limits` allow."""

    __slots__ = ("limits", "num_running", "requests", "tokens", "who")

    def __init__(self, limits: Limits, clock: Clock, who: str = "This key") -> None:
        self.limits = limits
        self.who = who
        self.num_running = 0
        rates = (limits.requests_per_minute, limits.tokens_per_minute)
        self.requests, self.tokens = (None if rate is None else Gcra(rate, clock) for rate in rates)

    def enter(self, *, spare: bool = False) -> None:
        """Begin a request; raises RequestError 429 that says when to come back.

        With `spare` it begins only where it leaves room for others: of several at once one, and
        half of a minute's worth.
        """
        at_once = self.limits.requests_at_once
        if at_once is not None and self.num_running >= max(1, at_once - spare):
            raise too_many(
                f"{self.who} may run {at_once} requests at once.", 1.0, "requests_at_once"
            )
        for name, rate in self._rates():
            wait_s = wait_of(rate, 1, spare)
            if wait_s > 0:
                raise self._exhausted(name, rate, wait_s)
        if self.requests is not None:
            self.requests.take(1)
        self.num_running += 1

    def leave(self, *, counted: bool = True) -> None:
        """The request that entered is over; one that is to come again is not `counted`."""
        self.num_running -= 1
        assert self.num_running >= 0
        if self.requests is not None and not counted:
            self.requests.give_back(1)

    def hold(self, count: int, param: str, *, spare: bool = False) -> int:
        """Hold the tokens that a request may take, and return them; raises RequestError.

        What can never be had is a 400: no waiting helps. `spare` is as in `enter`.
        """
        if self.tokens is None:
            return 0
        most = self.tokens.per_minute
        if count > most:
            raise RequestError(
                f"{self.who} may use {most} tokens per minute; this request may take {count}. "
                "Shorten the prompt, lower max_tokens, or ask for fewer answers.",
                param=param,
                code="tokens_per_minute_exceeded",
                reason="tokens_per_minute",
            )
        wait_s = wait_of(self.tokens, count, spare)
        if wait_s > 0:
            may = f"this request may take {count}; a lower max_tokens is let in sooner"
            raise self._exhausted("tokens", self.tokens, wait_s, may)
        self.tokens.hold(count)
        return count

    def settle(self, held: int, used: int) -> None:
        """The request that held so many tokens is over, and took `used`."""
        if self.tokens is not None:
            self.tokens.settle(held, used)

    def headers(self) -> list[Header]:
        """x-ratelimit-limit-requests: 600, -remaining-requests: 599, -reset-requests: 0.1s."""
        values = []
        for name, rate in self._rates():
            available = rate.available
            for what, value in (
                ("limit", str(rate.per_minute)),
                ("remaining", str(max(0, int(available)))),
                ("reset", f"{(rate.per_minute - available) * 60 / rate.per_minute:.1f}s"),
            ):
                values.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return values

    def _rates(self) -> list[tuple[str, Gcra]]:
        named = (("requests", self.requests), ("tokens", self.tokens))
        return [(name, rate) for name, rate in named if rate is not None]

    def _exhausted(self, name: str, rate: Gcra, wait_s: float, more: str = "") -> RequestError:
        message = f"{self.who} may use {rate.per_minute} {name} per minute"
        message = f"{message}; {more}." if more else f"{message}."
        return too_many(message, wait_s, f"{name}_per_minute")


def wait_of(rate: Gcra, count: int, spare: bool) -> float:
    """Seconds until `count` may be taken; with `spare` until as much as `SPARED` is left then.

    Of 120 a minute: 1 at once, with `spare` when 61 may be taken; 100 with `spare` when all may.
    """
    most = rate.per_minute
    return rate.wait_s(min(most, round(count + SPARED * most)) if spare else count)


def too_many(message: str, wait_s: float, reason: str) -> RequestError:
    """429: the caller's own limit."""
    return RequestError(
        message,
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=min(wait_s, MAX_RETRY_S),
        reason=reason,
    )
