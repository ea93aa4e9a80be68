"""How long it takes until one of those who wait has a row, while there are too few rows or blocks.

Worked example, somebody waits from 1.00 s on, and rows are taken at

    1.04  1.04  1.16 s      40, 0 and 120 ms after another: 53 ms each
"""

MEMORY = 32
"""Starts that count for the mean."""


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
            weight = 1 / min(self._num_starts, MEMORY)
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
        return self._mean_s + longer_s / min(self._num_starts + 1, MEMORY)
