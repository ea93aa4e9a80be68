"""Time from one source, so that a virtual clock can drive everything.

A `Clock` has two readings: `now_s`, monotonic, for durations, and `wall_s`, seconds since 1970, for
what a client reads. No other module of the engine, of telemetry or of a policy asks the operating
system for the time.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for engine and telemetry."""

    def now_s(self) -> float:
        """Return monotonic seconds; only differences have a meaning."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The operating system's clock."""

    def now_s(self) -> float:
        return time.perf_counter()

    def wall_s(self) -> float:
        return time.time()


class VirtualClock:
    """Clock that moves only when it is advanced: for tests and for simulation."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1.7e9) -> None:
        self._now_s = now_s
        self._offset_s = wall_s - now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` ≥ 0."""
        assert seconds >= 0, seconds
        self._now_s += seconds

    def advance_to(self, at_s: float) -> None:
        """Move time forward to exactly `at_s`; a past time changes nothing."""
        self._now_s = max(self._now_s, at_s)

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._offset_s
