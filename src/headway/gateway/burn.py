"""What the requests of a model have spent of its error budget, and whether they spend it too fast.

By the alerts that page somebody (`telemetry.budget_rules`): of a target of 0.99 one request in a
hundred may miss, and 14.4 times as many over an hour and over its last five minutes burn the
budget. Requests are counted by minute of the wall clock, so that a restart goes on.
"""

from collections import deque

from headway.core.clock import Clock, SystemClock
from headway.telemetry.budget_rules import ALERTS, MAX_MISSED_SHARE, Alert

MINUTES = {"5m": 5, "30m": 30, "1h": 60, "6h": 360}
PAGES = tuple(alert for alert in ALERTS if alert.severity == "page")
Minute = list[int]
"""Its number, the requests that were judged in it, those that missed."""


class ErrorBudget:
    """One model's, of which a share `target` is to meet the objectives."""

    def __init__(self, target: float, clock: Clock | None = None) -> None:
        self.target, self.clock = target, clock or SystemClock()
        self.minutes: deque[Minute] = deque(maxlen=max(MINUTES.values()))

    def add(self, missed: bool) -> None:
        """A request was judged."""
        now = self._now()
        if not self.minutes or self.minutes[-1][0] != now:
            self.minutes.append([now, 0, 0])
        self.minutes[-1][1] += 1
        self.minutes[-1][2] += missed

    def burns(self) -> str:
        """Which alert holds, in words; "" where none does."""
        return next((text for alert in PAGES if (text := self._describe(alert))), "")

    def _describe(self, alert: Alert) -> str:
        limit = min(alert.burn * (1 - self.target), MAX_MISSED_SHARE)
        shares = {window: self._share(window) for window in (alert.long, alert.short)}
        if any(share <= limit for share in shares.values()):
            return ""
        both = " and ".join(f"{share:.1%} in {window}" for window, share in shares.items())
        return f"{both} missed their objectives, more than {limit:.1%}"

    def _share(self, window: str) -> float:
        """The share that missed in it; 0 where nothing was judged."""
        first = self._now() - MINUTES[window]
        within = [each for each in self.minutes if each[0] > first]
        judged = sum(each[1] for each in within)
        return sum(each[2] for each in within) / judged if judged else 0.0

    def _now(self) -> int:
        return int(self.clock.wall_s() // 60)

    def check_integrity(self) -> None:
        assert all(0 <= missed <= judged for _, judged, missed in self.minutes)
