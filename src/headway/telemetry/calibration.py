"""A measurement of one machine with one model, as a file: what simulator, planner and tuner read.

It keeps the last steps raw (what each did, how long it took) and what the host adds to a request
outside of them. What a step is expected to take is fitted where the file is read, so a better fit
needs no new file. `GET /calibration` writes one, `headway bench --calibrate` puts on a load first
and adds what only a client sees.

Worked example of the host's part: a request has arrived at 0.000, and an engine with nothing to do
first has it in a step at 0.003: `in_s` is 3 ms. The step ends at 0.010, the token leaves at 0.011:
`out_s` is 1 ms. The client read it at 0.013 and had sent at 0.000: `door_s` is 2 ms.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from headway.core.contention import over
from headway.core.machine import num_cores
from headway.core.model_spec import ModelSpec
from headway.core.plan import Description
from headway.core.records import StepRecord
from headway.core.service import Alone
from headway.telemetry.host_cpu import cpu_costs
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.timeline import Timeline
from headway.telemetry.traffic import Asked, Origin, take_traffic

FORMAT, VERSION = "headway-calibration", 2
WHOLE_LOAD = 1
"""Files of this version have the front's medians under the whole load, waiting at it included."""
MOST_POSITIONS = 64
MOST_FAN_S = 2e-3
"""Tokens of one step leave nearer to each other than this."""


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


class HostCost(msgspec.Struct, kw_only=True):
    """Seconds outside of steps, medians; None where no request told.

    `in_s` and `in_token_s` from the arrival of a body to the engine, for each request and each
    token of its prompt; `out_s` from the end of a step to its first token's way out, `row_s` for
    each further token of the same step; `door_s` what a client sees beyond what the server sees.
    All but `row_s` are of requests that found an engine with nothing to do, where there were any,
    for what others wait is not theirs: `quiet` has (arrival on the clock of the steps, TTFT) of
    these. `request_cpu_s`, `step_cpu_s` and `token_cpu_s` are what the server's process computes
    for each, `client_…` what a load generator on the same machine does, `client_cpu_s` for a token;
    0 where not measured. They share `num_cores` with the engine.
    """

    in_s: float | None = None
    in_token_s: float = 0.0
    out_s: float | None = None
    row_s: float = 0.0
    door_s: float | None = None
    request_cpu_s: float = 0.0
    step_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    client_request_cpu_s: float = 0.0
    client_step_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    num_cores: int = 0
    num_requests: int = 0
    quiet: list[tuple[float, float]] = []


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
        others_share=others_share(telemetry),
        measured_at=round(telemetry.clock.wall_s(), 3),
        traffic=traffic,
        traffic_from_s=traffic_from_s,
    )


def columns(records: Iterable[StepRecord]) -> StepColumns:
    """Those of the steps that say something of the model: computed something, waited for nobody."""
    found = StepColumns()
    for r in records:
        seconds = r.duration_s + r.gap_s - r.draft_s - r.choose_s
        if not r.num_tokens or r.mask_wait_s or r.transfer_s or seconds <= 0:
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


# ── the host ────────────────────────────────────────────────────────────────────────────────


def host_cost(records: Sequence[StepRecord], timelines: Sequence[Timeline]) -> HostCost:
    """What requests took outside of steps.

    It is read off requests that found an engine with nothing to do: nobody else's step was in the
    way, and nobody's tokens left. Where no request found one, the way out is that of every first
    token whose step is known, and waits for others are in it.
    """
    if not records:
        return HostCost()
    starts = [r.started_s for r in records]
    ends = [r.started_s + r.duration_s for r in records]
    ways_in: list[tuple[int, float]] = []
    ways_out: list[tuple[bool, float]] = []
    quiet: list[tuple[float, float]] = []
    for timeline in timelines:
        scheduled_s, first_s = timeline.scheduled_s, timeline.first_s
        if scheduled_s is None or first_s is None:
            continue
        arrived_s = timeline.arrived_s
        at = bisect_right(starts, scheduled_s) - 1
        alone = at >= 0 and records[at].idle_s > 0 and arrived_s > starts[at] - records[at].idle_s
        if alone:
            ways_in.append((timeline.num_prompt, scheduled_s - arrived_s))
            quiet.append((round(arrived_s, 6), round(first_s - arrived_s, 7)))
        ended = bisect_right(ends, first_s) - 1
        if ended >= 0 and first_s - ends[ended] < records[ended].duration_s + 1.0:
            ways_out.append((alone, first_s - ends[ended]))
    in_s, in_token_s = straight(ways_in)
    ways_s = [way_s for alone, way_s in ways_out if alone] or [way_s for _, way_s in ways_out]
    return HostCost(
        in_s=in_s,
        in_token_s=in_token_s,
        out_s=round(median(ways_s), 7) if ways_s else None,
        row_s=row_seconds(timelines),
        num_requests=len(timelines),
        quiet=quiet,
    )


def straight(points: list[tuple[int, float]]) -> tuple[float | None, float]:
    """(seconds of none, seconds of one more) of (tokens, seconds): the median of the shorter half
    and of the longer half of the prompts, joined."""
    if not points:
        return None, 0.0
    points = sorted(points)
    low, high = points[: (len(points) + 1) // 2], points[len(points) // 2 :]
    x0, x1 = (median([x for x, _ in part]) for part in (low, high))
    y0, y1 = (median([y for _, y in part]) for part in (low, high))
    slope = max((y1 - y0) / (x1 - x0), 0.0) if x1 - x0 >= 16 else 0.0
    return round(max(min(y0, y1) - slope * x0, 0.0), 7), round(slope, 10)


def row_seconds(timelines: Sequence[Timeline]) -> float:
    """Seconds from one answer's token to the next answer's of the same step, the median.

    They come nearer to each other than steps do.
    """
    times = sorted(at_s for timeline in timelines for part in timeline.times for at_s in part)
    gaps = [b - a for a, b in pairwise(times) if 0 < b - a < MOST_FAN_S]
    return round(median(gaps), 7) if len(gaps) >= 32 else 0.0
