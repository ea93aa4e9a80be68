"""Cost of requests, and budgets of keys: reserved before a request, settled after it."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from headway.core.clock import Clock
from headway.core.errors import RequestError
from headway.gateway.config import PERIODS_S, BudgetRow, UpstreamPrice
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.speed import Speed

BUCKETS = 100
"""Buckets of a period: spending expires in steps of a hundredth."""


def dollars_of(price: UpstreamPrice, usage: UpstreamUsage, speed: Speed) -> float:
    """Return the cost of a usage: by price per million tokens, or by the machine's time.

    {input: 1, cached: 0.1, output: 4}, 1000 prompt tokens of which 500 cached, 100 output tokens:
    (500 x 1 + 500 x 0.1 + 100 x 4) / 1e6 = 0.00095 $.
    """
    fresh = max(0, usage.prompt - usage.cached)
    if price.hour is not None:
        seconds = fresh * speed.token_s + usage.output * speed.answer_s
        return seconds / 3600 * price.hour
    cached = price.input if price.cached is None else price.cached
    return (fresh * price.input + usage.cached * cached + usage.output * price.output) / (
        price.num_tokens
    )


def format_dollars(dollars: float) -> str:
    """Return an amount with cents, or with two significant digits below a dollar.

    >>> format_dollars(1234.5), format_dollars(0.00123456), format_dollars(0)
    ('$1,234.50', '$0.0012', '$0.00')
    """
    size = abs(dollars)
    if size >= 0.995 or size < 1e-12:
        return f"${dollars:,.2f}"
    exponent = int(f"{size:.1e}".partition("e")[2])  # of the rounded number: 0.0999 is 0.10
    return f"${dollars:.{1 - exponent}f}"


def format_budget(row: BudgetRow | None) -> str:
    """Return a budget for people."""
    return "no budget" if row is None else f"{format_dollars(row.dollars)} per {row.per}"


def format_price(price: UpstreamPrice | None) -> str:
    """Return a price with its unit, for people."""
    if price is None:
        return "no price"
    if price.hour is not None:
        return f"{format_dollars(price.hour)} per hour"
    cached = "" if price.cached is None else f"{format_dollars(price.cached)} cached, "
    unit = {"1M": "1M tokens", "1k": "1k tokens", "token": "token"}[price.per]
    return (
        f"{format_dollars(price.input)} in, {cached}{format_dollars(price.output)} out per {unit}"
    )


class KeyBudget:
    """Budget of a key or a team: spending in the period, and running requests."""

    def __init__(self, row: BudgetRow, clock: Clock, who: str) -> None:
        self.row = row
        self._clock = clock
        self._who = who
        self._period_s = PERIODS_S[row.per]
        self._spent: deque[tuple[int, float]] = deque()
        self._total = self._held = 0.0

    @property
    def available(self) -> float:
        """Return the dollars that may be reserved now."""
        self._forget()
        return self.row.dollars - self._total - self._held

    def hold(self, dollars: float) -> None:
        """Reserve dollars; raises RequestError 429 if they are not available now, 400 if never."""
        whole = f"{self._who} may spend {format_dollars(self.row.dollars)} per {self.row.per}"
        if dollars > self.row.dollars > 0:
            raise RequestError(
                f"{whole}; this request may cost {format_dollars(dollars)}. Send fewer prompts, or "
                "lower n and max_tokens, which is the model's context where it is left out.",
                code="budget_exceeded",
                reason="dollars",
            )
        if self.available < dollars or self.available <= 0:
            raise RequestError(
                f"{whole}, and {format_dollars(max(self.available, 0))} is left; this request may "
                f"cost {format_dollars(dollars)}.",
                code="insufficient_quota",
                status=429,
                reason="dollars",
            )
        self._held += dollars

    def release(self, held: float) -> None:
        """Release a reservation of which nothing was spent."""
        self._held = max(0.0, self._held - held)

    def settle(self, held: float, spent: float) -> None:
        """Release a reservation and add what was spent."""
        self.release(held)
        self.add(spent, self._clock.wall_s())

    def add(self, dollars: float, at_s: float) -> None:
        """Add dollars that were spent at a wall-clock time."""
        bucket = int(at_s * BUCKETS / self._period_s)
        if self._spent and self._spent[-1][0] == bucket:
            self._spent[-1] = bucket, self._spent[-1][1] + dollars
        else:
            self._spent.append((bucket, dollars))
        self._total += dollars

    def snapshot(self) -> dict[str, Any]:
        """Return what it allows, what is spent, reserved and left, in dollars."""
        available = max(0.0, self.available)
        return {
            **{"dollars": self.row.dollars, "per": self.row.per, "spent": self._total},
            **{"held": self._held, "left": available},
        }

    def _forget(self) -> None:
        now = int(self._clock.wall_s() * BUCKETS / self._period_s)
        while self._spent and self._spent[0][0] <= now - BUCKETS:
            self._total -= self._spent.popleft()[1]
        if not self._spent:
            self._total = 0.0


class KeyBudgets:
    """Budgets by key or by team; `*` gives each key without a row of its own a budget of its own.

    `who` names one in messages, from its name.
    """

    def __init__(self, clock: Clock, who: str = "This key") -> None:
        self._clock = clock
        self._who = who
        self._rows: dict[str, BudgetRow] = {}
        self._budgets: dict[str, KeyBudget] = {}

    def load(self, rows: dict[str, BudgetRow]) -> None:
        """Use these rows; a key whose row is unchanged keeps its spending."""
        self._rows = rows
        self._budgets = {
            name: budget for name, budget in self._budgets.items() if budget.row == self._row(name)
        }

    def snapshots(self, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield what the budgets of these keys have left."""
        for key in keys:
            budget = self.of(key)
            if budget is not None:
                yield {"name": key, **budget.snapshot()}

    @property
    def periods_s(self) -> list[float]:
        """Return the seconds of the periods of all rows."""
        return [PERIODS_S[row.per] for row in self._rows.values()]

    @property
    def names(self) -> list[str]:
        """Return the keys that have a budget, or have had one of the row `*`."""
        return [*(name for name in self._rows if name != "*"), *self._budgets]

    def _row(self, key: str) -> BudgetRow | None:
        return self._rows.get(key, self._rows.get("*"))

    def of(self, key: str) -> KeyBudget | None:
        """Return the budget of a key; None for unlimited."""
        row = self._row(key)
        if row is None:
            return None
        if key not in self._budgets:
            self._budgets[key] = KeyBudget(row, self._clock, self._who.format(key))
        return self._budgets[key]
