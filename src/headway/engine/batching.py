"""When newcomers may start: continuous, dynamic and static batching, three rules of one engine.

A newcomer waits behind the `BatchGate` until the rule lets it in; from then on it is a member of
the batch, and the scheduler's own queue, preemption and forks know nothing of rules. A rule answers
with the moment from which the gate may empty, so the same answer says whether to go on and when to
wake. Worked example, batches of 4, a window of 50 ms; a, b and c come at 0, 20 and 90 ms, each
alone needs 100 ms:

    continuous   a starts at 0, b joins it at 20, c joins both at 90
    dynamic      a and b start at 50, when a has waited enough; c starts when both have ended
    static       nobody starts until a fourth has come
"""

from collections.abc import Callable, Iterator
from math import inf

from headway.core.clock import Clock
from headway.engine.sequence import Sequence

AT_ONCE, NOT_YET = -inf, inf


class BatchGate:
    """Sequences that have come and are in no batch yet, in the order they came.

    Given the name of a rule, the sequences that make a batch full and the time a dynamic one waits
    for that, it lets sequences in; `flush` promises that nobody is kept waiting for others.
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
        """A newcomer, behind the others."""
        self._queue.append((self._clock.now_s(), sequence))

    def flush(self) -> None:
        """No more will come: those who are here start in batches, full or not."""
        self._flushed = bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether a whole batch is here; the siblings of an `n` > 1 request count."""
        return sum(1 + len(sequence.forks) for sequence in self) >= self.batch_size

    @property
    def patience_ends_s(self) -> float:
        """When the first has waited for the window."""
        return self._queue[0][0] + self.window_s

    def opens_at(self, busy: bool) -> float:
        """From when on somebody may go in while a batch runs (`busy`) or none does.

        NOT_YET where time alone changes nothing, AT_ONCE where nothing is missing.
        """
        if not self._queue:
            return NOT_YET
        if self._flushed and not busy:
            return AT_ONCE
        return self._rule(self, busy)

    def is_open(self, busy: bool) -> bool:
        """Whether somebody may go in now."""
        return self.opens_at(busy) <= self._clock.now_s()

    def let_in(self, busy: bool) -> list[Sequence]:
        """Those who go in now, taken out of here: at most a batch, at least one if any may."""
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
        """Take `sequence` out, its forks in its place; False when it is not here."""
        for at, (came_s, queued) in enumerate(self._queue):
            if queued is sequence:
                self._queue[at : at + 1] = [(came_s, fork) for fork in sequence.forks]
                sequence.forks = []
                self._flushed = self._flushed and bool(self._queue)
                return True
        return False

    def check_integrity(self) -> None:
        """Assert the order of arrival, and that a promise is kept for somebody."""
        came = [came_s for came_s, _ in self._queue]
        assert came == sorted(came), "not in the order they came"
        assert self._queue or not self._flushed, "flushed and nobody is here"


# ── the rules ───────────────────────────────────────────────────────────────────────────────


def continuous(gate: BatchGate, busy: bool) -> float:
    """Newcomers join at every step."""
    return AT_ONCE


def dynamic(gate: BatchGate, busy: bool) -> float:
    """A full batch, or what has come when the first has waited long enough; held to its end."""
    if busy:
        return NOT_YET
    return AT_ONCE if gate.is_full else gate.patience_ends_s


def static(gate: BatchGate, busy: bool) -> float:
    """A full batch, held until its longest is done."""
    return NOT_YET if busy or not gate.is_full else AT_ONCE


BATCHING: dict[str, Callable[[BatchGate, bool], float]] = {
    "continuous": continuous,
    "dynamic": dynamic,
    "static": static,
}
