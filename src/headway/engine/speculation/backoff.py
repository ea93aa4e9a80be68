"""Backoff: when to stop asking for draft tokens that do not pay, and when to probe again.

active                  asked in every step, until 16 consecutive ones did not pay
backed off              asked in 4 steps after 16 without, then after 32, 64, 64, …
a probe pays            active again
"""

from math import inf

PATIENCE = 16
"""Consecutive steps that do not pay before the first pause."""
FIRST_INTERVAL, MAX_INTERVAL = 16, 64
"""Skipped steps before a probe; each probe that does not pay doubles them."""
PROBE_STEPS = 4
"""Steps of a probe: proposals of the first one are scored in the next ones."""


class Backoff:
    """Counts steps; `record` says of each step for which `is_due` was true whether it paid."""

    def __init__(
        self,
        patience: int = PATIENCE,
        max_interval: int = MAX_INTERVAL,
        probe_steps: int = PROBE_STEPS,
    ) -> None:
        self._patience, self._max_interval = patience, max_interval
        self._probe_steps = probe_steps
        self._num_unpaid = self._num_skipped = self._num_probed = 0
        self._interval = FIRST_INTERVAL

    @property
    def is_active(self) -> bool:
        """Return whether most steps are skipped."""
        return self._num_unpaid >= self._patience

    def is_due(self, max_interval: float = inf) -> bool:
        """Return whether to ask in the next step, which is counted.

        At most `max_interval` steps are skipped, if that is less than the current interval.

        >>> backoff = Backoff(patience=0, probe_steps=2)
        >>> [step for step in range(1, 40) if backoff.is_due()]
        [17, 18, 35, 36]
        """
        if not self.is_active:
            return True
        if self._num_skipped < min(self._interval, max_interval):
            self._num_skipped += 1
            return False
        self._num_probed += 1
        if self._num_probed == self._probe_steps:
            self._num_skipped = self._num_probed = 0
        return True

    def record(self, *, paid: bool) -> None:
        """Record whether the step that was due paid."""
        if paid:
            self._num_unpaid = self._num_skipped = self._num_probed = 0
            self._interval = FIRST_INTERVAL
            return
        if self.is_active and not self._num_probed:
            self._interval = min(2 * self._interval, self._max_interval)
        self._num_unpaid += 1


class NoBackoff(Backoff):
    """Backoff that is always due: for measurements and tests of draft tokens."""

    @property
    def is_active(self) -> bool:
        """Return False."""
        return False
