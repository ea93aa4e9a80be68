"""Cost of a request outside the engine's steps: latency, and the server's CPU time.

The CPU time of the server's process is read once a second (`telemetry.contention.CpuWatch`) with
the requests, steps and tokens of that second; the costs are the least squares of all seconds, none
below zero. What the process computes without any request is a separate part and left out. Worked
example, 40 ms a second without a request, 2 ms a request, 0.1 ms a token:

    0 requests, 0 tokens: 40 ms    5 and 400: 90 ms    20 and 1,600: 240 ms

Worked example of the latency: a request arrives at 0.000, and an idle engine has it in a step at
0.003: `in_s` is 3 ms. The step ends at 0.010, the token leaves at 0.011: `out_s` is 1 ms. The
client reads it at 0.013 and has sent the request at 0.000: `door_s` is 2 ms.
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
"""Maximum time between the departures of two tokens of one step."""
MIN_BUSY_SECONDS = 8
"""Minimum number of seconds with tokens for a regression."""
Floats = NDArray[np.float64]


def cpu_costs_of(rows: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Return CPU seconds of (a request, a step, a token); zeros if too little is known.

    A row of `rows` is (requests, steps, tokens, CPU seconds) of one second.
    """
    if sum(tokens > 0 for _, _, tokens, _ in rows) < MIN_BUSY_SECONDS:
        return 0.0, 0.0, 0.0
    table = np.array(rows, dtype=float)
    work = np.column_stack([table[:, :3], np.ones(len(table))])
    request, step, token, _ = nonnegative_least_squares(work, table[:, 3]).tolist()
    return round(request, 7), round(step, 7), round(token, 8)


def nonnegative_least_squares(work: Floats, seconds: Floats) -> Floats:
    """Return the least squares without negative parts: the best choice of parts that has none."""
    num_parts = work.shape[1]
    best, best_costs = float("inf"), np.zeros(num_parts)
    for count in range(1, num_parts + 1):
        for parts in map(list, combinations(range(num_parts), count)):
            costs = np.linalg.lstsq(work[:, parts], seconds, rcond=None)[0]
            off = float(((work[:, parts] @ costs - seconds) ** 2).sum())
            if (costs >= 0).all() and off < best * (1 - 1e-9):
                best, best_costs = off, np.zeros(num_parts)
                best_costs[parts] = costs
    return best_costs


# ── latency of a request outside its steps ──────────────────────────────────────────────────


class HostCost(msgspec.Struct, kw_only=True):
    """Seconds outside of steps, medians; None if not measured.

    `in_s` and `in_token_s` from the arrival of a body to the engine, per request and per token of
    its prompt; `out_s` from the end of a step to the departure of a first token, `row_s` for each
    further token of the same step; `door_s` the latency that a client sees beyond the server's.
    All but `row_s` are of requests that met an idle engine, if there were any, because queueing
    behind other requests is not their own latency: `quiet` has (arrival on the clock of the steps,
    TTFT) of these. `request_cpu_s`, `step_cpu_s` and `token_cpu_s` are the server's CPU time,
    `client_…` that of a load generator on the same machine, `client_cpu_s` per token; 0 if not
    measured. They share `num_cores` with the engine.
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
    """Times of a request's arrival, first step and tokens, in seconds of one clock."""

    arrived_s: float
    scheduled_s: float | None
    first_s: float | None
    num_prompt: int
    times: Any


def host_cost(records: Sequence[StepRecord], timelines: Sequence[RequestTimes]) -> HostCost:
    """Return the latency of requests outside of steps.

    It is measured on requests that met an idle engine, without other steps or tokens in the way. If
    there are none, `out_s` is that of every first token whose step is known, including waits for
    other requests.
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
    in_s, in_token_s = fit_line(ways_in)
    ways_s = [way_s for alone, way_s in ways_out if alone] or [way_s for _, way_s in ways_out]
    return HostCost(
        in_s=in_s,
        in_token_s=in_token_s,
        out_s=round(median(ways_s), 7) if ways_s else None,
        row_s=row_seconds(timelines),
        num_requests=len(timelines),
        quiet=quiet,
    )


def fit_line(points: list[tuple[int, float]]) -> tuple[float | None, float]:
    """Fit a line through (tokens, seconds); returns (seconds of 0 tokens, seconds per token).

    It joins the medians of the shorter half and of the longer half of the prompts.
    """
    if not points:
        return None, 0.0
    points = sorted(points)
    low, high = points[: (len(points) + 1) // 2], points[len(points) // 2 :]
    x0, x1 = (median([x for x, _ in part]) for part in (low, high))
    y0, y1 = (median([y for _, y in part]) for part in (low, high))
    slope = max((y1 - y0) / (x1 - x0), 0.0) if x1 - x0 >= 16 else 0.0
    return round(max(min(y0, y1) - slope * x0, 0.0), 7), round(slope, 10)


def row_seconds(timelines: Sequence[RequestTimes]) -> float:
    """Return the median seconds between the tokens of two answers of the same step.

    These are closer to each other than steps are.
    """
    times = sorted(at_s for timeline in timelines for part in timeline.times for at_s in part)
    gaps = [b - a for a, b in pairwise(times) if 0 < b - a < MAX_TOKEN_GAP_S]
    return round(median(gaps), 7) if len(gaps) >= 32 else 0.0
