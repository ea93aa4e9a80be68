"""Batching rules: when new requests may start under continuous, dynamic and static batching.

A new sequence waits before the `BatchGate` until the rule admits it to the scheduler's queue, which
knows no rules. A rule returns the time from which the gate is open: it tells both whether to admit
now and when to wake. Worked example, batches of 4, a window of 50 ms; a, b and c arrive at 0, 20
and 90 ms, each alone needs 100 ms:

    continuous   a starts at 0, b joins it at 20, c joins both at 90
    dynamic      a and b start at 50, when a has waited enough; c starts when both have ended
    static       none starts until a fourth has arrived
"""

from collections.abc import Callable, Iterator
from math import inf

from headway.core.clock import Clock
from headway.engine.sequence import Sequence

AT_ONCE, NOT_YET = -inf, inf


class BatchGate:
    """Sequences that are in no batch yet, by arrival.

    `batching` names the rule; `batch_size` sequences make a batch full, and a dynamic batch waits
    `window_s` for that. After `flush` batches start full or not.
    """

    __slots__ = ("_clock", "_flushed", "_queue", "_rule", "batch_size", "window_s")

    def __init__(self, batching: str, batch_size: int, window_s: float, clock: Clock) -> None:
        self._rule = BATCHING[batching]
        self.batch_size = batch_size
        self.window_s = window_s
        self._clock = clock
        self._queue: list[tuple[float, Sequence]] = []
        self._flushed = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._queue)

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence."""
        self._queue.append((self._clock.now_s(), sequence))

    def flush(self) -> None:
        """Expect no more requests: those here start in batches, full or not."""
        self._flushed = bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Return whether a whole batch is here; the forks of an `n` > 1 request count."""
        return sum(1 + len(sequence.forks) for sequence in self) >= self.batch_size

    @property
    def window_ends_s(self) -> float:
        """Return the time until which the first sequence waits for a batch."""
        return self._queue[0][0] + self.window_s

    def opens_at_s(self, busy: bool) -> float:
        """Return when the gate opens, while a batch runs (`busy`) or none does.

        NOT_YET where time alone changes nothing, AT_ONCE where nothing is missing.
        """
        if not self._queue:
            return NOT_YET
        if self._flushed and not busy:
            return AT_ONCE
        return self._rule(self, busy)

    def is_open(self, busy: bool) -> bool:
        """Return whether sequences may be admitted now."""
        return self.opens_at_s(busy) <= self._clock.now_s()

    def admit(self, busy: bool) -> list[Sequence]:
        """Remove and return the sequences admitted now: at most a batch, and at least one."""
        if not self.is_open(busy):
            return []
        count, size = 0, 0
        for sequence in self:
            size += 1 + len(sequence.forks)
            if count and size > self.batch_size:
                break
            count += 1
        members = [sequence for _, sequence in self._queue[:count]]
        del self._queue[:count]
        self._flushed = self._flushed and bool(self._queue)
        return members

    def remove(self, sequence: Sequence) -> bool:
        """Replace `sequence` by its forks; return False when it is not here."""
        for at, (arrival_s, queued) in enumerate(self._queue):
            if queued is sequence:
                self._queue[at : at + 1] = [(arrival_s, fork) for fork in sequence.forks]
                sequence.forks = []
                self._flushed = self._flushed and bool(self._queue)
                return True
        return False

    def check_integrity(self) -> None:
        """Assert the order of arrival, and that only a gate with sequences is flushed."""
        arrivals = [arrival_s for arrival_s, _ in self._queue]
        assert arrivals == sorted(arrivals), "not by arrival"
        assert self._queue or not self._flushed, "flushed and empty"


# ── the rules ───────────────────────────────────────────────────────────────────────────────


def continuous(gate: BatchGate, busy: bool) -> float:
    """Admit at every step."""
    return AT_ONCE


def dynamic(gate: BatchGate, busy: bool) -> float:
    """Admit a full batch, or what has arrived when the window ends; run it to its end."""
    if busy:
        return NOT_YET
    return AT_ONCE if gate.is_full else gate.window_ends_s


def static(gate: BatchGate, busy: bool) -> float:
    """Admit a full batch; run it until its longest answer ends."""
    return NOT_YET if busy or not gate.is_full else AT_ONCE


BATCHING: dict[str, Callable[[BatchGate, bool], float]] = {
    "continuous": continuous,
    "dynamic": dynamic,
    "static": static,
}
