"""Observed rates: bytes from one tier to another, and rows that come free while there are too few.

A rate is the prior's at first, then learned from the transfers. Worked example of the rows: a
request waits from 1.00 s on, and rows are taken at

    1.04  1.04  1.16 s      40, 0 and 120 ms after another: 53 ms each
"""

from headway.core.plan import Moved

START_S = 0.001
"""What a read takes before its first byte."""
PRIOR_BYTE_S = 1 / 0.7e9
"""A byte read from a disk and hashed, until reads were measured."""
READ_FORGETS, READ_DOUBTS = 0.3, 0.02
"""Weight of the newest read, and how far each restore that seemed too slow moves the rate back."""
READ_CLIP = 4.0
"""A read counts as so many times slower or faster than predicted at most: one may be a hiccup."""
COPY_FORGETS, COPY_DOUBTS = 0.2, 0.05
"""The same of copies between the device and the host."""
SLOT_STARTS = 32
"""Starts that count for the mean."""


class ReadRate:
    """Seconds of a read, by its bytes."""

    def __init__(self, prior_byte_s: float = PRIOR_BYTE_S) -> None:
        self.prior_byte_s = self.byte_s = prior_byte_s

    def read_s(self, num_bytes: int) -> float:
        """Predicted seconds of a read."""
        return START_S + num_bytes * self.byte_s

    def observe(self, moved: Moved) -> None:
        """A read has ended, or was given up."""
        ratio = moved.seconds / self.read_s(moved.asked_bytes)
        ratio = min(max(ratio, 1 / READ_CLIP), READ_CLIP)
        self.byte_s *= 1 + READ_FORGETS * (ratio - 1)

    def doubt(self) -> None:
        """A read was not made: what was measured may have been a hiccup."""
        self.byte_s += READ_DOUBTS * (self.prior_byte_s - self.byte_s)


class CopyRate:
    """Seconds a byte takes between device and host: the prior's until transfers were measured."""

    def __init__(self, prior_s: float) -> None:
        self.prior_s = self.byte_s = prior_s
        self.num_observed = 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Transfers of so many bytes took so long in all."""
        if num_bytes and seconds > 0:
            weight = max(COPY_FORGETS, 1 / (self.num_observed + 1))
            self.byte_s += weight * (seconds / num_bytes - self.byte_s)
            self.num_observed += 1

    def doubt(self) -> None:
        """A copy seemed too slow: nothing is measured then, and what was may have been a hiccup."""
        self.byte_s += COPY_DOUBTS * (self.prior_s - self.byte_s)


class SlotRate:
    """The mean time between starts, of the times in which somebody waited for room."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._num_starts = 0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """One who waited has its row and its blocks."""
        if self._since_s is not None:
            self._num_starts += 1
            weight = 1 / min(self._num_starts, SLOT_STARTS)
            self._mean_s += weight * (now_s - self._since_s - self._mean_s)
            self._since_s = now_s

    def step(self, now_s: float, *, lacking: bool) -> None:
        """A step is formed; whether somebody is still waiting for room."""
        if not lacking:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def row_s(self, now_s: float) -> float:
        """Seconds until the next of those who wait has a row; 0 while there is room."""
        if self._since_s is None or not self._num_starts:
            return 0.0
        longer_s = max(now_s - self._since_s - self._mean_s, 0.0)
        return self._mean_s + longer_s / min(self._num_starts + 1, SLOT_STARTS)
