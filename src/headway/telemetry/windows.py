"""The last five minutes, second by second: what windows are summed from.

Each second has a `Slot`: counts, the gaps between tokens that left in it, the requests that ended,
and sums over its steps. Adding is a few additions; percentiles are made when somebody asks. A slot
is never changed once its second is over; then the gaps are kept in bins.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from headway.core.records import StepRecord
from headway.telemetry.contention import CoreUse
from headway.telemetry.gaps import GapCounts
from headway.telemetry.goodput import Ended
from headway.telemetry.snapshot import WINDOWS_S


@dataclass(slots=True)
class StepSums:
    """Sums over some steps, named as in `StepRecord`; `kv_tokens_read` by KV group."""

    kv_tokens_read: list[int]
    kv_usage_max: float = 0.0
    count: int = 0
    num_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled: int = 0
    attended_tokens: int = 0
    experts_read: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    gap_s: float = 0.0
    idle_s: float = 0.0
    num_drafts: int = 0
    num_kept_drafts: int = 0
    num_forced: int = 0
    num_forced_rows: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @classmethod
    def over(cls, num_groups: int, *parts: "StepSums") -> "StepSums":
        """The sums of all `parts`."""
        whole = cls([0] * num_groups)
        for part in parts:
            whole.merge(part)
        return whole

    def add(self, record: StepRecord) -> None:
        """Take one step. Written out, for this runs in every one."""
        self.count += 1
        self.num_tokens += record.num_tokens
        self.num_decode_tokens += record.num_decode_tokens
        self.num_sampled += record.num_sampled
        self.attended_tokens += record.attended_tokens
        self.experts_read += record.experts_read
        self.num_running += record.num_running
        self.num_waiting += record.num_waiting
        self.kv_usage += record.kv_usage
        self.schedule_s += record.schedule_s
        self.execute_s += record.execute_s
        self.update_s += record.update_s
        self.prepare_s += record.prepare_s
        self.forward_s += record.forward_s
        self.sample_s += record.sample_s
        self.gap_s += record.gap_s
        self.idle_s += record.idle_s
        if record.kv_usage > self.kv_usage_max:
            self.kv_usage_max = record.kv_usage
        read = self.kv_tokens_read
        for group, tokens in enumerate(record.kv_tokens_read):
            read[group] += tokens
        if record.has_more:
            self.num_forced += record.num_forced
            self.num_forced_rows += record.num_forced_rows
            self.num_drafts += record.num_drafts
            self.num_kept_drafts += record.num_kept_drafts
            self.draft_s += record.draft_s
            self.verify_s += record.verify_s

    def merge(self, other: "StepSums") -> None:
        """Add the sums of `other`."""
        for name in PLAIN_SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_usage_max = max(self.kv_usage_max, other.kv_usage_max)
        pairs = zip(self.kv_tokens_read, other.kv_tokens_read, strict=True)
        self.kv_tokens_read = [mine + theirs for mine, theirs in pairs]

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_decodes(self) -> int:
        """Sequences that decoded, summed over the steps; their drafts are no tokens they had, and
        forced tokens came before."""
        return self.num_decode_tokens - self.num_drafts - self.num_forced_rows

    @property
    def duration_s(self) -> float:
        return self.schedule_s + self.execute_s + self.update_s

    @property
    def other_s(self) -> float:
        """What of executing is neither preparing nor the model."""
        return max(self.execute_s - self.prepare_s - self.forward_s - self.sample_s, 0.0)


PLAIN_SUMS = [f.name for f in fields(StepSums) if f.name not in ("kv_tokens_read", "kv_usage_max")]


class Slot:
    """One second."""

    __slots__ = (
        *("arrivals", "cached_tokens", "closed", "decode", "durations", "ended", "first_tokens"),
        "gaps",
        "host_s",
        *("num_preemptions", "prediction_errors", "prefill", "prompt_tokens", "queried_tokens"),
        *("cores", "probe_shares", "saved_s", "second", "verified"),
    )

    def __init__(self, second: int, num_groups: int) -> None:
        self.second = second
        self.arrivals = 0
        self.first_tokens = 0
        self.prompt_tokens = 0
        self.queried_tokens = 0
        self.cached_tokens = 0
        self.saved_s = 0.0
        self.num_preemptions = 0
        self.gaps: dict[str, array[float]] = {}
        self.closed: dict[str, GapCounts] | None = None
        self.ended: list[Ended] = []
        self.cores: list[CoreUse] = []
        self.host_s = 0.0
        """CPU seconds of the server's process, 0 where nobody tells."""
        self.probe_shares: list[float] = []
        """What the probes of this second reached of the best."""
        self.verified: dict[str, list[int]] = {}
        """Who guessed → drafts, their tokens, those that were right."""
        self.durations = array("d")
        self.prediction_errors = array("d")
        self.decode = StepSums.over(num_groups)
        self.prefill = StepSums.over(num_groups)

    def add(self, record: StepRecord) -> None:
        """Take one step."""
        (self.prefill if record.num_tokens > record.num_decode_tokens else self.decode).add(record)
        duration_s = record.schedule_s + record.execute_s + record.update_s
        self.durations.append(duration_s)
        if record.predicted_s:
            error = abs(record.predicted_s / (duration_s + record.gap_s) - 1)
            self.prediction_errors.append(error)
        self.queried_tokens += record.num_queried_tokens
        self.cached_tokens += record.num_cached_tokens
        for source, count, kept in record.verified:
            counts = self.verified.setdefault(source, [0, 0, 0])
            counts[0] += 1
            counts[1] += count
            counts[2] += kept

    def gap_counts(self) -> dict[str, GapCounts]:
        """The gaps that left in this second, by class, in bins."""
        if self.closed is not None:
            return self.closed
        found = {}
        for name, gaps in self.gaps.items():
            found[name] = GapCounts()
            found[name].add(np.frombuffer(gaps))
        return found

    def close(self) -> None:
        """The second is over: keep the bins, forget the gaps."""
        self.closed = self.gap_counts()
        self.gaps = {}


class Slots:
    """The slots of the last five minutes, the newest last; `start_s` is when counting began."""

    def __init__(self, start_s: float, num_groups: int) -> None:
        self.start_s = start_s
        self.num_groups = num_groups
        self._slots: deque[Slot] = deque(maxlen=max(WINDOWS_S))
        self.current = self._new(int(start_s))

    def _new(self, second: int) -> Slot:
        slot = Slot(second, self.num_groups)
        self._slots.append(slot)
        return slot

    def at(self, now_s: float) -> Slot:
        """The slot of this moment; a new one when a second has begun."""
        if int(now_s) > self.current.second:
            self.current.close()
            self.current = self._new(int(now_s))
        return self.current

    def last(self, seconds: int, now_s: float) -> tuple[list[Slot], float]:
        """(the slots of the last `seconds`, the seconds they cover).

        The second that runs now is one of them: at 100.25 the last 10 are 91 … 100, 9.25 s.
        """
        first = int(now_s) - seconds + 1
        found = [slot for slot in self._slots if slot.second >= first]
        return found, max(now_s - max(float(first), self.start_s), 1e-9)


def steps_of(slots: list[Slot], num_groups: int) -> tuple[StepSums, StepSums]:
    """(steps without prefill, steps with) of `slots`."""
    decode = StepSums.over(num_groups, *[slot.decode for slot in slots if slot.decode.count])
    prefill = StepSums.over(num_groups, *[slot.prefill for slot in slots if slot.prefill.count])
    return decode, prefill


def gaps_of(slots: list[Slot]) -> dict[str, GapCounts]:
    """Class → the gaps between its tokens."""
    found: dict[str, GapCounts] = {}
    for slot in slots:
        for name, counts in slot.gap_counts().items():
            found.setdefault(name, GapCounts()).merge(counts)
    return found


def joined(arrays: "Iterable[array[float]]") -> np.ndarray:
    """One array of the doubles in `arrays`."""
    parts = [np.frombuffer(part) for part in arrays if part]
    return np.concatenate(parts) if parts else np.empty(0)
