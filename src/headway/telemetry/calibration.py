"""A measurement of one machine with one model, as a file: what simulator, planner and tuner read.

It keeps the last steps raw (what each did, how long it took) and what the host adds to a request
outside of them. The mean of a step is fitted where the file is read, so a better fit needs no new
file; what the engine's own model had learned is in it as it stood. `GET /calibration` writes one,
`headway bench --calibrate` puts on a load first and adds what only a client sees.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from headway.core.machine import num_cores
from headway.core.plan import Description
from headway.core.records import ModelSnapshot, StepRecord
from headway.core.service import Alone
from headway.perf.frontend import HostCost, cpu_costs_of, host_cost
from headway.perf.model import observed_s
from headway.spec import ModelSpec
from headway.telemetry.contention import over
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.traffic import Asked, Origin, take_traffic
from headway.telemetry.windows import Slot

FORMAT, VERSION = "headway-calibration", 2
WHOLE_LOAD = 1
"""Files of this version have the front's medians under the whole load, waiting at it included."""
MOST_POSITIONS = 64


class StepColumns(msgspec.Struct, kw_only=True):
    """Steps in the order in which they ran, a value each.

    `seconds` from the end of the step before, where work waited, to its own end, without what a
    drafter took. Work is counted as in `StepRecord`; `read` is summed over KV groups. `engine` says
    who ran each, of several; a file without it is of one.
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


class Calibration(msgspec.Struct, kw_only=True):
    """All of the file; sizes as in `/stats`. `others_share` of our cores' time went elsewhere."""

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
    alone: Alone
    steps: StepColumns
    host: HostCost
    acceptance: dict[str, list[float]] = {}
    """Who guessed → the share right at each position, where those before were right."""
    others_share: float | None = None
    measured_at: float = 0.0
    """Seconds since 1970."""
    step_model: ModelSnapshot | None = None
    """What the engine's cost model had learned, of several engines the first's; None in older
    files."""
    traffic: list[Asked] = []
    """The requests of the same time."""
    traffic_from_s: float | None = None
    """When the first of them came, on the clock of the steps."""
    origin: Origin | None = None
    """What the server was started with; None where it does not tell."""


def fingerprint(spec: ModelSpec) -> str:
    """What a step's cost depends on of a model: its dimensions, not its weights."""
    sizes = [
        *(spec.architecture, spec.vocab_size, spec.hidden_size, spec.intermediate_size),
        *(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tied, spec.num_sparse),
        [(len(group.layers), group.window + group.sinks) for group in spec.kv_groups],
    ]
    if spec.experts is not None:
        experts = spec.experts
        sizes += [experts.count, experts.active, experts.intermediate_size]
    return hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()


def take_calibration(telemetry: Telemetry, since_s: float = 0.0) -> Calibration | None:
    """What the steps since then tell; None before the engine is ready."""
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
    return Calibration(
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
        steps=columns(records),
        host=host,
        acceptance=acceptance(records),
        step_model=model.snapshot() if model is not None else None,
        others_share=others_share(telemetry),
        measured_at=round(telemetry.clock.wall_s(), 3),
        traffic=traffic,
        traffic_from_s=traffic_from_s,
    )


def columns(records: Iterable[StepRecord]) -> StepColumns:
    """Return the columns of the steps that teach a model something."""
    found = StepColumns()
    for r in records:
        seconds = observed_s(r)
        if not seconds:
            continue
        found.started_s.append(round(r.started_s, 6))
        found.seconds.append(round(seconds, 7))
        found.tokens.append(r.num_tokens)
        found.sampled.append(r.num_sampled)
        found.attended.append(r.attended_tokens)
        found.read.append(sum(r.kv_tokens_read))
        found.engine.append(r.engine)
    if not any(found.engine):
        found.engine.clear()
    return found


def acceptance(records: Iterable[StepRecord]) -> dict[str, list[float]]:
    """By guesser and position, the share of guesses that were right where all before them were.

    Of guesses of 3 of which 1 was right, the first counts as right and the second as wrong.
    """
    asked: dict[str, list[int]] = {}
    right: dict[str, list[int]] = {}
    for record in records:
        for source, count, kept in record.verified:
            tried = asked.setdefault(source, [0] * MOST_POSITIONS)
            held = right.setdefault(source, [0] * MOST_POSITIONS)
            for position in range(min(count, kept + 1, MOST_POSITIONS)):
                tried[position] += 1
                held[position] += position < kept
    return {
        source: [round(r / n, 4) for r, n in zip(right[source], counts, strict=True) if n]
        for source, counts in asked.items()
    }


def others_share(telemetry: Telemetry) -> float | None:
    """The mean share of the cores that others had in the seconds that are kept."""
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    use = over([use for slot in slots for use in slot.cores])
    return None if use is None else round(use.others_share + use.steal_share, 4)


def cpu_costs(slots: Iterable[Slot]) -> tuple[float, float, float]:
    """CPU seconds of (a request, a step, a token); zeros where too little is known."""
    return cpu_costs_of([(*front_work(slot), slot.host_s) for slot in slots if slot.host_s])


def front_work(slot: Slot) -> tuple[int, int, int]:
    """What one second had: (requests, steps, tokens that left)."""
    gaps = sum(counts.count for counts in slot.gap_counts().values())
    return slot.arrivals, slot.decode.count + slot.prefill.count, gaps + slot.first_tokens
