"""The last five minutes, second by second, from which the figures of windows are summed.

Each second has a `Slot`: counts, the gaps between tokens sent in it, the requests that ended, and
sums over its steps. Percentiles are computed on reading. A slot does not change after its second;
its gaps are then stored in bins.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from headway.core.records import StepRecord
from headway.telemetry.contention import CoreUse
from headway.telemetry.gaps import GapCounts
from headway.telemetry.goodput import EndedRequest
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
        """Return the sums of all `parts`."""
        whole = cls([0] * num_groups)
        for part in parts:
            whole.merge(part)
        return whole

    def add(self, record: StepRecord) -> None:
        """Add one step. Written out, because it runs in every step."""
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
        """Return the decoding sequences, summed over the steps: decode rows without draft tokens
        and without rows of forced tokens."""
        return self.num_decode_tokens - self.num_drafts - self.num_forced_rows

    @property
    def duration_s(self) -> float:
        return self.schedule_s + self.execute_s + self.update_s

    @property
    def other_s(self) -> float:
        """Return the seconds of executing without preparing, forward and sampling."""
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
        self.ended: list[EndedRequest] = []
        self.cores: list[CoreUse] = []
        self.host_s = 0.0
        """CPU seconds of the server's process, 0 where unknown."""
        self.probe_shares: list[float] = []
        """Shares of the best probe that the probes of this second reached."""
        self.verified: dict[str, list[int]] = {}
        """Proposer → [drafts, draft tokens, accepted tokens]."""
        self.durations = array("d")
        self.prediction_errors = array("d")
        self.decode = StepSums.over(num_groups)
        self.prefill = StepSums.over(num_groups)

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        (self.prefill if record.num_tokens > record.num_decode_tokens else self.decode).add(record)
        duration_s = record.schedule_s + record.execute_s + record.update_s
        self.durations.append(duration_s)
        if record.predicted_s:
            error = abs(record.predicted_s / (duration_s + record.gap_s) - 1)
            self.prediction_errors.append(error)
        self.queried_tokens += record.num_queried_tokens
        self.cached_tokens += record.num_cached_tokens
        for source, count, num_accepted in record.verified:
            counts = self.verified.setdefault(source, [0, 0, 0])
            counts[0] += 1
            counts[1] += count
            counts[2] += num_accepted

    def gap_counts(self) -> dict[str, GapCounts]:
        """Return the gaps of this second in bins, by class."""
        if self.closed is not None:
            return self.closed
        binned = {}
        for name, gaps in self.gaps.items():
            binned[name] = GapCounts()
            binned[name].add(np.frombuffer(gaps))
        return binned

    def close(self) -> None:
        """Replace the gaps by bins at the end of the second."""
        self.closed = self.gap_counts()
        self.gaps = {}


class Slots:
    """The slots of the last five minutes, the newest last; counting began at `start_s`."""

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
        """Return the slot of this moment, a new one if a new second has begun."""
        if int(now_s) > self.current.second:
            self.current.close()
            self.current = self._new(int(now_s))
        return self.current

    def last(self, seconds: int, now_s: float) -> tuple[list[Slot], float]:
        """Return (slots of the last `seconds`, seconds that they cover).

        The present second is included: at 100.25 the last 10 are 91 … 100, which cover 9.25 s.
        """
        first = int(now_s) - seconds + 1
        slots = [slot for slot in self._slots if slot.second >= first]
        return slots, max(now_s - max(float(first), self.start_s), 1e-9)


def steps_of(slots: list[Slot], num_groups: int) -> tuple[StepSums, StepSums]:
    """Return the sums of (steps without prefill, steps with prefill) of `slots`."""
    decode = StepSums.over(num_groups, *[slot.decode for slot in slots if slot.decode.count])
    prefill = StepSums.over(num_groups, *[slot.prefill for slot in slots if slot.prefill.count])
    return decode, prefill


def gaps_of(slots: list[Slot]) -> dict[str, GapCounts]:
    """Return class → gaps between its tokens."""
    by_class: dict[str, GapCounts] = {}
    for slot in slots:
        for name, counts in slot.gap_counts().items():
            by_class.setdefault(name, GapCounts()).merge(counts)
    return by_class


def joined(arrays: "Iterable[array[float]]") -> np.ndarray:
    """Return the concatenation of arrays of doubles."""
    parts = [np.frombuffer(part) for part in arrays if part]
    return np.concatenate(parts) if parts else np.empty(0)
