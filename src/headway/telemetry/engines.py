"""State of the engines of one model, by number, and the number of engines that the traffic needs.

The demand is counted in engines at the promised pace, not in busy time: an engine with one request
is busy all the time. It is the time of prefill, and the decoded tokens over those that one engine
makes with as many rows as the pace allows, by the snapshot of its step model. Example, decode steps
of 8 ms plus 0.1 ms a row, 20 ms promised:

    prefill took 0.9 s of each second               0.9 engines
    3,000 tokens/s, 120 rows an engine at 20 ms     3,000 x 0.020 / 120 = 0.5 engines
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable

import msgspec

from headway.core.clock import Clock
from headway.core.records import NO_STEP, StepRecord
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS
from headway.perf.model import StepModel, Work

BOTH = "both"
DISK = "disk"
HALF_LIFE_S = 20.0
MAX_ROWS = 4096
DEFAULT_TPOT_S = 0.1
"""Pace of decoding where the default class promises none."""


def promised_tpot_s(classes: dict[str, ServiceClass]) -> float:
    """Return the promised time per output token of the default class, in seconds."""
    return classes[DEFAULT_CLASS].slo.tpot_s or DEFAULT_TPOT_S


class EngineDemand:
    """Estimate of the engines that the recent traffic needs, with a half-life of 20 s."""

    def __init__(self, clock: Clock, tpot_s: Callable[[], float]) -> None:
        self._clock, self._tpot_s = clock, tpot_s
        self._attended = self._read = 0.0
        """Tokens per row in the last step without prefill."""
        self._prefill_s = self._decode_s = self._span_s = 0.0
        self._at_s = clock.now_s()
        self._rows_by: tuple[StepModel | None, float] = None, 0.0
        self._rows = 0

    def on_record(self, record: StepRecord, model: StepModel | None) -> None:
        """Take the record of a step; `model` is the engine's step model, where known."""
        rows, tpot_s = record.num_decode_tokens, self._tpot_s()
        if rows and not record.num_prefill_tokens:
            self._attended = record.attended_tokens / rows
            self._read = sum(record.kv_tokens_read) / rows
        self._decay()
        if record.num_prefill_tokens:
            decodes_s = model.seconds(self._decodes(rows)) if model and rows else 0.0
            self._prefill_s += max(record.duration_s - decodes_s, 0.0)
        if rows:
            self._decode_s += rows * tpot_s / self._rows_at(model, tpot_s)

    def _decodes(self, rows: int) -> Work:
        """Return the work of a step that decodes `rows` rows with contexts as at present."""
        return Work(rows, rows, round(rows * self._attended), round(rows * self._read))

    def _rows_at(self, model: StepModel | None, tpot_s: float) -> int:
        """Return the largest number of rows (at least 1) of a decode step within `tpot_s`.

        The result is cached for each snapshot of the model.
        """
        if model is None:
            return MAX_ROWS
        if self._rows_by != (model, tpot_s):
            rows = range(1, MAX_ROWS + 1)
            count = bisect_right(rows, tpot_s, key=lambda n: model.seconds(self._decodes(n)))
            self._rows, self._rows_by = max(count, 1), (model, tpot_s)
        return self._rows

    def _decay(self) -> None:
        """Reduce the weight of earlier traffic by the time that has passed."""
        passed_s = max(self._clock.now_s() - self._at_s, 0.0)
        keep = 0.5 ** (passed_s / HALF_LIFE_S)
        self._at_s += passed_s
        self._prefill_s, self._decode_s = keep * self._prefill_s, keep * self._decode_s
        self._span_s = keep * self._span_s + passed_s

    @property
    def engines_needed(self) -> tuple[float, float]:
        """Return (engines for prefill, engines for decode); zeros before any time has passed."""
        self._decay()
        if not self._span_s:
            return 0.0, 0.0
        return self._prefill_s / self._span_s, self._decode_s / self._span_s


class Engines:
    """The `num` engines of one model: which are `ready`, and the last step of each.

    `roles` has the role of each engine where prefill and decode are disaggregated; else empty.
    """

    def __init__(self, demand: EngineDemand) -> None:
        self.num, self.demand = 1, demand
        self.roles: list[str] = []
        self.ready: set[int] = set()
        self.last_of: dict[int, StepRecord] = {}
        self.models: dict[int, StepModel] = {}
        """Step model of each engine as of its last snapshot."""
        self._tier_bytes: dict[tuple[int, str], int] = {}

    @property
    def last(self) -> StepRecord:
        """Return the last step; of several engines their last steps merged into one record."""
        return merge_last_steps(list(self.last_of.values()))

    @property
    def last_steps(self) -> dict[int, StepRecord]:
        """Return the last step of each engine, `NO_STEP` for one that has made none or died."""
        return {n: self.last_of.get(n, NO_STEP) for n in range(self.num)}

    def role_of(self, engine: int) -> str:
        """Return the role of an engine: `prefill`, `decode` or `both`."""
        return self.roles[engine] if self.roles else BOTH

    @property
    def num_by_role(self) -> dict[str, int]:
        """Return role → number of ready engines."""
        return dict(Counter(self.role_of(engine) for engine in self.ready))

    def on_record(self, record: StepRecord) -> int:
        """Take the record of a step; return the number of new preemptions of its engine.

        A restarted engine counts from 0 again.
        """
        before = self.last_of.get(record.engine, NO_STEP).num_preemptions
        self.last_of[record.engine] = record
        if record.model is not None:
            self.models[record.engine] = StepModel.of(record.model)
        self.demand.on_record(record, self.models.get(record.engine))
        for use in record.kv_tiers:
            self._tier_bytes[record.engine, use.tier] = use.num_bytes
        return max(record.num_preemptions - before, 0)

    def on_death(self, engine: int) -> None:
        """Forget the state of a dead engine: its requests and its KV blocks."""
        self.ready.discard(engine)
        self.last_of.pop(engine, None)
        self.models.pop(engine, None)
        for key in [key for key in self._tier_bytes if key[0] == engine]:
            if key[1] != DISK:  # blocks on disk outlive the engine
                del self._tier_bytes[key]

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Return tier → bytes of cached KV blocks, over all engines."""
        totals = dict.fromkeys((tier for _, tier in self._tier_bytes), 0)
        for (_, tier), num_bytes in self._tier_bytes.items():
            totals[tier] += num_bytes
        return totals


def merge_last_steps(records: list[StepRecord]) -> StepRecord:
    """Return the newest record with the sequences and blocks of all `records` summed up."""
    if len(records) < 2:
        return records[0] if records else NO_STEP
    newest = max(records, key=lambda record: record.started_s)
    blocks = zip(*(record.group_blocks_used for record in records))
    return msgspec.structs.replace(
        newest,
        num_running=sum(record.num_running for record in records),
        num_waiting=sum(record.num_waiting for record in records),
        num_deferred=sum(record.num_deferred for record in records),
        kv_blocks_used=sum(record.kv_blocks_used for record in records),
        kv_usage=sum(record.kv_usage for record in records) / len(records),
        group_blocks_used=tuple(sum(used) for used in blocks),
    )
