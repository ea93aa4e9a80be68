"""What the server's process computes for a request, a step of the engine and a token of an answer.

Its CPU time is read once a second (`core.contention.CpuWatch`) beside what came and left in that
second; the costs are the least squares of all seconds, none below zero. What it computes whatever
comes is told apart and left out. Worked example, 40 ms a second for its own sake, 2 ms a request,
0.1 ms a token:

    0 requests, 0 tokens: 40 ms    5 and 400: 90 ms    20 and 1,600: 240 ms
"""

from collections.abc import Iterable
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from headway.telemetry.windows import Slot

LEAST_SECONDS = 8
"""Fewer seconds in which tokens left tell nothing apart."""
Floats = NDArray[np.float64]


def cpu_costs(slots: Iterable[Slot]) -> tuple[float, float, float]:
    """CPU seconds of (a request, a step, a token); zeros where too little is known."""
    return costs_of([(*work_of(slot), slot.host_s) for slot in slots if slot.host_s])


def costs_of(rows: list[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """The same of (requests, steps, tokens, CPU seconds) of each second."""
    if sum(tokens > 0 for _, _, tokens, _ in rows) < LEAST_SECONDS:
        return 0.0, 0.0, 0.0
    table = np.array(rows, dtype=float)
    work = np.column_stack([table[:, :3], np.ones(len(table))])
    request, step, token, _ = not_negative(work, table[:, 3]).tolist()
    return round(request, 7), round(step, 7), round(token, 8)


def work_of(slot: Slot) -> tuple[int, int, int]:
    """What one second had: (requests, steps, tokens that left)."""
    gaps = sum(counts.count for counts in slot.gap_counts().values())
    return slot.arrivals, slot.decode.count + slot.prefill.count, gaps + slot.first_tokens


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
