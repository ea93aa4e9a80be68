"""Calibration file: a measurement of one machine with one model, for simulator, planner and tuner.

It holds the last steps as raw records (work and seconds of each) and what the host adds to a
request outside of them. The reader of the file fits the mean of a step, so a better fit needs no
new file; the engine's own step model is included as a snapshot. `GET /calibration` returns one;
`headway bench --calibrate` applies a load first and adds what only a client can measure.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from headway.core.machine import num_cores
from headway.core.plan import Description
from headway.core.records import ModelSnapshot, StepRecord
from headway.core.service import UnloadedTimes
from headway.perf.frontend import HostCost, cpu_costs_of, host_cost
from headway.perf.model import observed_s
from headway.spec import ModelSpec
from headway.telemetry.contention import mean_core_use
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.traffic import Origin, TrafficRequest, take_traffic
from headway.telemetry.windows import Slot

FORMAT, VERSION = "headway-calibration", 2
WHOLE_LOAD = 1
"""Version whose medians of the host were measured under the whole load, queueing included."""
MAX_POSITIONS = 64


class StepColumns(msgspec.Struct, kw_only=True):
    """Columns of a table of steps, in the order in which they ran.

    `seconds` is the time from the end of the previous step, where work waited, to the end of this
    one, without the time of the draft model. Work is counted as in `StepRecord`; `read` is summed
    over KV groups. `engine` is the engine of each step; empty with a single engine.
    """

    started_s: list[float] = []
    seconds: list[float] = []
    tokens: list[int] = []
    sampled: list[int] = []
    attended: list[int] = []
    read: list[int] = []
    engine: list[int] = []

    def __len__(self) -> int:
        return len(self.seconds)


class MachineCalibration(msgspec.Struct, kw_only=True):
    """Content of the file; sizes as in `/stats`.

    `others_share` is the share of the cores' time that other processes used.
    """

    format: str = FORMAT
    version: int = VERSION
    headway: str
    model: str
    fingerprint: str
    description: Description
    settings: dict[str, str]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    group_blocks: list[int]
    vocab_size: int
    alone: UnloadedTimes
    steps: StepColumns
    host: HostCost
    acceptance: dict[str, list[float]] = {}
    """Proposer → acceptance rate at each draft position, given that all before were accepted."""
    others_share: float | None = None
    measured_at: float = 0.0
    """Seconds since 1970."""
    step_model: ModelSnapshot | None = None
    """Step model of the engine (of the first one of several); None in older files."""
    traffic: list[TrafficRequest] = []
    """Requests of the same time span."""
    traffic_from_s: float | None = None
    """Arrival of the first request, on the clock of the steps."""
    origin: Origin | None = None
    """Settings with which the server was started, where known."""


def fingerprint(spec: ModelSpec) -> str:
    """Return a hash of the dimensions that the cost of a step depends on, without the weights."""
    sizes = [
        *(spec.architecture, spec.vocab_size, spec.hidden_size, spec.intermediate_size),
        *(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tied, spec.num_sparse),
        [(len(group.layers), group.window + group.sinks) for group in spec.kv_groups],
    ]
    if spec.experts is not None:
        experts = spec.experts
        sizes += [experts.count, experts.active, experts.intermediate_size]
    return hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()


def take_calibration(telemetry: Telemetry, since_s: float = 0.0) -> MachineCalibration | None:
    """Return the calibration of the steps since `since_s`; None before the engine is ready."""
    ready = telemetry.ready
    if ready is None:
        return None
    records = [r for r in telemetry.steps if r.started_s >= since_s]
    timelines = [t for t in telemetry.finished if t.arrived_s >= since_s]
    host = host_cost(records, timelines)
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    since = [slot for slot in slots if slot.second >= int(since_s)]
    host.request_cpu_s, host.step_cpu_s, host.token_cpu_s = cpu_costs(since)
    host.num_cores = num_cores()
    model = next(iter(telemetry.engines.models.values()), None)
    traffic, traffic_from_s = take_traffic(telemetry, since_s)
    return MachineCalibration(
        headway=telemetry.version,
        model=telemetry.names[0],
        fingerprint=fingerprint(telemetry.spec),
        description=ready.description,
        settings=ready.settings,
        max_model_len=ready.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        block_size=ready.block_size,
        group_blocks=ready.group_blocks,
        vocab_size=ready.vocab_size,
        alone=ready.alone,
        steps=step_columns(records),
        host=host,
        acceptance=acceptance(records),
        step_model=model.snapshot() if model is not None else None,
        others_share=others_share(telemetry),
        measured_at=round(telemetry.clock.wall_s(), 3),
        traffic=traffic,
        traffic_from_s=traffic_from_s,
    )


def step_columns(records: Iterable[StepRecord]) -> StepColumns:
    """Return the columns of the steps that a step model can learn from."""
    columns = StepColumns()
    for r in records:
        seconds = observed_s(r)
        if not seconds:
            continue
        columns.started_s.append(round(r.started_s, 6))
        columns.seconds.append(round(seconds, 7))
        columns.tokens.append(r.num_tokens)
        columns.sampled.append(r.num_sampled)
        columns.attended.append(r.attended_tokens)
        columns.read.append(sum(r.kv_tokens_read))
        columns.engine.append(r.engine)
    if not any(columns.engine):
        columns.engine.clear()
    return columns


def acceptance(records: Iterable[StepRecord]) -> dict[str, list[float]]:
    """Return the acceptance rate by proposer and position, given that all before were accepted.

    Of a draft of 3 tokens with 1 accepted, the first counts as accepted, the second as rejected,
    and the third is not counted.
    """
    proposed: dict[str, list[int]] = {}
    accepted: dict[str, list[int]] = {}
    for record in records:
        for source, count, num_accepted in record.verified:
            tried = proposed.setdefault(source, [0] * MAX_POSITIONS)
            hits = accepted.setdefault(source, [0] * MAX_POSITIONS)
            for position in range(min(count, num_accepted + 1, MAX_POSITIONS)):
                tried[position] += 1
                hits[position] += position < num_accepted
    return {
        source: [round(r / n, 4) for r, n in zip(accepted[source], counts, strict=True) if n]
        for source, counts in proposed.items()
    }


def others_share(telemetry: Telemetry) -> float | None:
    """Return the mean share of the cores that other processes and machines used, if known."""
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    use = mean_core_use([use for slot in slots for use in slot.cores])
    return None if use is None else round(use.others_share + use.steal_share, 4)


def cpu_costs(slots: Iterable[Slot]) -> tuple[float, float, float]:
    """Return CPU seconds of (a request, a step, a token); zeros where too little is known."""
    return cpu_costs_of([(*host_work(slot), slot.host_s) for slot in slots if slot.host_s])


def host_work(slot: Slot) -> tuple[int, int, int]:
    """Return the work of the server's process in one second: (requests, steps, sent tokens)."""
    gaps = sum(counts.count for counts in slot.gap_counts().values())
    return slot.arrivals, slot.decode.count + slot.prefill.count, gaps + slot.first_tokens
