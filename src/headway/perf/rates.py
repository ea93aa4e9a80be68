"""Observed rates: bytes per second between tiers, and slots that become free under load.

A rate starts with a prior and is learned from the transfers. Worked example of the slots: a request
waits from 1.00 s on, and slots are taken at

    1.04  1.04  1.16 s      intervals of 40, 0 and 120 ms: 53 ms in the mean
"""

from headway.core.plan import Moved

READ_START_S = 0.001
"""Seconds of a read before its first byte."""
PRIOR_BYTE_S = 1 / 0.7e9
"""Seconds per byte read from a disk and hashed, until reads were measured."""
READ_WEIGHT, READ_DECAY = 0.3, 0.02
"""Weight of the newest read, and the decay towards the prior after a read that was not made."""
MAX_READ_RATIO = 4.0
"""Maximum factor of an observed over the predicted time, because one read may be a hiccup."""
COPY_WEIGHT, COPY_DECAY = 0.2, 0.05
"""The same for copies between the device and the host."""
SLOT_STARTS = 32
"""Number of starts of waiting requests in the running mean."""


class ReadRate:
    """Seconds of a read, by its bytes."""

    def __init__(self, prior_byte_s: float = PRIOR_BYTE_S) -> None:
        self.prior_byte_s = self.byte_s = prior_byte_s

    def read_s(self, num_bytes: int) -> float:
        """Return predicted seconds of a read."""
        return READ_START_S + num_bytes * self.byte_s

    def observe(self, moved: Moved) -> None:
        """Learn from a read that has ended, or was given up."""
        ratio = moved.seconds / self.read_s(moved.asked_bytes)
        ratio = min(max(ratio, 1 / MAX_READ_RATIO), MAX_READ_RATIO)
        self.byte_s *= 1 + READ_WEIGHT * (ratio - 1)

    def doubt(self) -> None:
        """Move back towards the prior: a read was not made because the rate seemed too slow."""
        self.byte_s += READ_DECAY * (self.prior_byte_s - self.byte_s)


class CopyRate:
    """Seconds per byte between device and host: the prior until transfers were measured."""

    def __init__(self, prior_s: float) -> None:
        self.prior_s = self.byte_s = prior_s
        self.num_observed = 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from transfers of `num_bytes` in all."""
        if num_bytes and seconds > 0:
            weight = max(COPY_WEIGHT, 1 / (self.num_observed + 1))
            self.byte_s += weight * (seconds / num_bytes - self.byte_s)
            self.num_observed += 1

    def doubt(self) -> None:
        """Move back towards the prior: a copy was not made because the rate seemed too slow."""
        self.byte_s += COPY_DECAY * (self.prior_s - self.byte_s)


class SlotRate:
    """Mean time between starts of waiting requests, while slots or blocks are short."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._num_starts = 0
        self._since_s: float | None = None

    def record_start(self, now_s: float) -> None:
        """Record that a waiting request got its slot and its blocks."""
        if self._since_s is not None:
            self._num_starts += 1
            weight = 1 / min(self._num_starts, SLOT_STARTS)
            self._mean_s += weight * (now_s - self._since_s - self._mean_s)
            self._since_s = now_s

    def step(self, now_s: float, *, lacking: bool) -> None:
        """Begin a step; `lacking` tells whether a request still waits for room."""
        if not lacking:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def slot_s(self, now_s: float) -> float:
        """Return seconds until the next waiting request has a slot; 0 while there is room."""
        if self._since_s is None or not self._num_starts:
            return 0.0
        longer_s = max(now_s - self._since_s - self._mean_s, 0.0)
        return self._mean_s + longer_s / min(self._num_starts + 1, SLOT_STARTS)
