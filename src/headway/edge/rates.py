"""Rate limits of a user: concurrent requests, requests and tokens per minute.

A `Meter` counts for one key, or for one key in one class. The maximum cost of a request is reserved
when it enters and settled when it ends, so that no user gets more than one minute's quota at once,
nor more than the rate in the long run.
"""

from headway.core.clock import Clock
from headway.core.errors import RequestError
from headway.core.service import KeyLimits

MAX_RETRY_S = 120.0
RESERVED_BURST_SHARE = 0.5
"""Share of a minute's quota that lines of batches leave to other requests of their key. A batch
still reaches the full rate; only the burst is reserved."""
Header = tuple[bytes, bytes]


class Gcra:
    """Rate with a burst of one minute: the generic cell rate algorithm (ITU-T I.371, annex A).

    `due_s` is the time at which all charges are paid off at the rate; it lies at most a minute
    ahead. A reservation counts like a charge until it is settled. Example: at 120 per minute and
    nothing used, 120 may be taken at once; a second later 2 more; with 100 reserved 20, and after
    these are settled as 30: 90.
    """

    __slots__ = ("_clock", "_due_s", "_held", "per_minute")

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._due_s, self._held = clock.now_s(), 0

    @property
    def available(self) -> float:
        """Return the units that may be charged now; below 0 if more was used than reserved."""
        unpaid_s = max(0.0, self._due_s - self._clock.now_s())
        return self.per_minute - unpaid_s * self.per_minute / 60 - self._held

    def wait_s(self, count: int) -> float:
        """Return the seconds until `count` may be taken, if all reservations are used."""
        return max(0.0, count - self.available) * 60 / self.per_minute

    def take(self, count: int) -> None:
        """Charge `count` now."""
        self._due_s = max(self._due_s, self._clock.now_s()) + count * 60 / self.per_minute

    def hold(self, count: int) -> None:
        """Reserve `count` until it is settled."""
        self._held += count

    def settle(self, held: int, used: int) -> None:
        """Replace a reservation by `used`, which may be more."""
        self._held -= held
        self.take(used)

    def give_back(self, count: int) -> None:
        """Take back a charge of `count`."""
        self._due_s -= count * 60 / self.per_minute

    def check_integrity(self) -> None:
        """Check that reservations are not negative."""
        assert self._held >= 0


class Meter:
    """Usage of one user within its `limits`."""

    __slots__ = ("limits", "num_running", "requests", "tokens", "who")

    def __init__(self, limits: KeyLimits, clock: Clock, who: str = "This key") -> None:
        self.limits = limits
        self.who = who
        self.num_running = 0
        rates = (limits.requests_per_minute, limits.tokens_per_minute)
        self.requests, self.tokens = (None if rate is None else Gcra(rate, clock) for rate in rates)

    def enter(self, *, spare: bool = False) -> None:
        """Begin a request; raises RequestError 429 with the time to retry.

        With `spare` it begins only if it leaves room for others: one concurrent request, and half
        of a minute's quota.
        """
        at_once = self.limits.requests_at_once
        if at_once is not None and self.num_running >= max(1, at_once - spare):
            raise rate_limit_error(
                f"{self.who} may run {at_once} requests at once.", 1.0, "requests_at_once"
            )
        for name, rate in self._rates():
            wait_s = seconds_until(rate, 1, spare)
            if wait_s > 0:
                raise self._exhausted(name, rate, wait_s)
        if self.requests is not None:
            self.requests.take(1)
        self.num_running += 1

    def leave(self, *, counted: bool = True) -> None:
        """End a request; one that will be repeated is not `counted`."""
        self.num_running -= 1
        assert self.num_running >= 0
        if self.requests is not None and not counted:
            self.requests.give_back(1)

    def hold(self, count: int, param: str, *, spare: bool = False) -> int:
        """Reserve the maximum tokens of a request and return them; raises RequestError.

        A request above a whole minute's quota gets 400, because waiting does not help. `spare` is
        as in `enter`.
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
        wait_s = seconds_until(self.tokens, count, spare)
        if wait_s > 0:
            may = f"this request may take {count}; a lower max_tokens is let in sooner"
            raise self._exhausted("tokens", self.tokens, wait_s, may)
        self.tokens.hold(count)
        return count

    def settle(self, held: int, used: int) -> None:
        """Settle the tokens of a request: `held` were reserved, `used` were taken."""
        if self.tokens is not None:
            self.tokens.settle(held, used)

    def headers(self) -> list[Header]:
        """Return x-ratelimit-limit-requests: 600, -remaining-requests: 599, -reset-…: 0.1s."""
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
        return rate_limit_error(message, wait_s, f"{name}_per_minute")


def seconds_until(rate: Gcra, count: int, spare: bool) -> float:
    """Return the seconds until `count` may be taken; `spare` leaves `RESERVED_BURST_SHARE`.

    At 120 per minute: 1 at once, with `spare` when 61 may be taken; 100 with `spare` when 120 may.
    """
    most = rate.per_minute
    return rate.wait_s(min(most, round(count + RESERVED_BURST_SHARE * most)) if spare else count)


def rate_limit_error(message: str, wait_s: float, reason: str) -> RequestError:
    """Return the 429 of a caller's own limit."""
    return RequestError(
        message,
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=min(wait_s, MAX_RETRY_S),
        reason=reason,
    )
