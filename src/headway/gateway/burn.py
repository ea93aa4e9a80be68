"""Error budget of a model: how much of it is spent, and whether it is spent too fast.

The thresholds are those of the paging alerts (`telemetry.budget_rules`): with a target of 0.99 one
request in a hundred may miss its objectives, and the budget burns if 14.4 times as many miss over
an hour and over its last five minutes. Requests are counted by minute of the wall clock, so that
the count survives a restart.
"""

from collections import deque

from headway.core.clock import Clock, SystemClock
from headway.telemetry.budget_rules import ALERTS, MAX_MISSED_SHARE, Alert

MINUTES = {"5m": 5, "30m": 30, "1h": 60, "6h": 360}
PAGES = tuple(alert for alert in ALERTS if alert.severity == "page")
Minute = list[int]
"""[minute number, judged requests, missed requests]."""


class ErrorBudget:
    """Error budget of one model: a share `target` of its requests has to meet the objectives."""

    def __init__(self, target: float, clock: Clock | None = None) -> None:
        self.target, self.clock = target, clock or SystemClock()
        self.minutes: deque[Minute] = deque(maxlen=max(MINUTES.values()))

    def add(self, missed: bool) -> None:
        """Count a judged request."""
        now = self._now()
        if not self.minutes or self.minutes[-1][0] != now:
            self.minutes.append([now, 0, 0])
        self.minutes[-1][1] += 1
        self.minutes[-1][2] += missed

    def alert_text(self) -> str:
        """Return the text of the alert that fires, or ""."""
        return next((text for alert in PAGES if (text := self._describe(alert))), "")

    def _describe(self, alert: Alert) -> str:
        limit = min(alert.burn * (1 - self.target), MAX_MISSED_SHARE)
        shares = {window: self._share(window) for window in (alert.long, alert.short)}
        if any(share <= limit for share in shares.values()):
            return ""
        both = " and ".join(f"{share:.1%} in {window}" for window, share in shares.items())
        return f"{both} missed their objectives, more than {limit:.1%}"

    def _share(self, window: str) -> float:
        """Return the share of requests that missed in a window; 0 without requests."""
        first = self._now() - MINUTES[window]
        within = [each for each in self.minutes if each[0] > first]
        judged = sum(each[1] for each in within)
        return sum(each[2] for each in within) / judged if judged else 0.0

    def _now(self) -> int:
        return int(self.clock.wall_s() // 60)

    def check_integrity(self) -> None:
        assert all(0 <= missed <= judged for _, judged, missed in self.minutes)
