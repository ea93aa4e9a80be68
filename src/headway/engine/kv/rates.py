"""What a byte takes from one tier to another: a guess at first, then learned from the transfers."""

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
