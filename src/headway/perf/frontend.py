"""What a request takes outside of the engine's steps, and the server's CPU time for it.

The CPU time of its process is read once a second (`telemetry.contention.CpuWatch`) beside what came
and left in that second; the costs are the least squares of all seconds, none below zero. What the
process computes without any request is a part of its own and left out. Worked example, 40 ms a
second without a request, 2 ms a request, 0.1 ms a token:

    0 requests, 0 tokens: 40 ms    5 and 400: 90 ms    20 and 1,600: 240 ms

Worked example of the time outside of steps: a request has arrived at 0.000, and an engine with
nothing to do first has it in a step at 0.003: `in_s` is 3 ms. The step ends at 0.010, the token
leaves at 0.011: `out_s` is 1 ms. The client read it at 0.013 and had sent at 0.000: `door_s` is
2 ms.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.records import StepRecord

MAX_TOKEN_GAP_S = 2e-3
"""Tokens of one step leave nearer to each other than this."""
MIN_BUSY_SECONDS = 8
"""Fewer seconds in which tokens left tell nothing apart."""
Floats = NDArray[np.float64]


def cpu_costs_of(rows: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Return CPU seconds of (a request, a step, a token); zeros where too little is known.

    A row of `rows` is (requests, steps, tokens, CPU seconds) of one second.
    """
    if sum(tokens > 0 for _, _, tokens, _ in rows) < MIN_BUSY_SECONDS:
        return 0.0, 0.0, 0.0
    table = np.array(rows, dtype=float)
    work = np.column_stack([table[:, :3], np.ones(len(table))])
    request, step, token, _ = not_negative(work, table[:, 3]).tolist()
    return round(request, 7), round(step, 7), round(token, 8)


def not_negative(work: Floats, seconds: Floats) -> Floats:
    """Least squares without a negative part: the best of all choices of parts that has none."""
    num_parts = work.shape[1]
    best, found = float("inf"), np.zeros(num_parts)
    for count in range(1, num_parts + 1):
        for parts in map(list, combinations(range(num_parts), count)):
            costs = np.linalg.lstsq(work[:, parts], seconds, rcond=None)[0]
            off = float(((work[:, parts] @ costs - seconds) ** 2).sum())
            if (costs >= 0).all() and off < best * (1 - 1e-9):
                best, found = off, np.zeros(num_parts)
                found[parts] = costs
    return found


# ── a request beside its steps ───────────────────────────────────────────────────────────────


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


class RequestTimes(Protocol):
    """When a request arrived, was first scheduled and had its tokens, in seconds of one clock."""

    arrived_s: float
    scheduled_s: float | None
    first_s: float | None
    num_prompt: int
    times: Any


def host_cost(records: Sequence[StepRecord], timelines: Sequence[RequestTimes]) -> HostCost:
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


def row_seconds(timelines: Sequence[RequestTimes]) -> float:
    """Seconds from one answer's token to the next answer's of the same step, the median.

    They come nearer to each other than steps do.
    """
    times = sorted(at_s for timeline in timelines for part in timeline.times for at_s in part)
    gaps = [b - a for a, b in pairwise(times) if 0 < b - a < MAX_TOKEN_GAP_S]
    return round(median(gaps), 7) if len(gaps) >= 32 else 0.0
