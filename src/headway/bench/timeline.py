"""A run over time: requests in flight, received tokens, and latencies."""

import math

import msgspec
import numpy as np

from headway.bench.latency import Latency
from headway.measure.record import Exchange, RecordedRun

MAX_STEPS = 60
NICE_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RunTimeline(msgspec.Struct, kw_only=True):
    """One value for each step of `step_s`; `at_s` is the begin of a step. Latencies by scheduled
    time."""

    step_s: float
    at_s: list[float]
    concurrency: list[float]
    sent_per_s: list[float]
    output_tokens_per_s: list[float]
    failed_per_s: list[float]
    ttft_p50_s: list[float | None]
    ttft_p99_s: list[float | None]
    tpot_p50_s: list[float | None]


def timeline(run: RecordedRun, exchanges: list[tuple[Exchange, Latency | None]]) -> RunTimeline:
    """Return the whole run, edges included, in at most 60 steps."""
    end_s = max([run.load.span_s, *(x.ended_s or 0.0 for x, _ in exchanges)])
    step_s = next((s for s in NICE_STEPS_S if end_s / s <= MAX_STEPS), end_s / MAX_STEPS)
    steps = max(1, math.ceil(end_s / step_s + 1e-9))
    edges = np.arange(steps + 1) * step_s
    chunk_s, tokens = list[float](), list[float]()
    sent, failed = np.zeros(steps), np.zeros(steps)
    ttft: list[list[float]] = [[] for _ in range(steps)]
    tpot: list[list[float]] = [[] for _ in range(steps)]
    for x, timed in exchanges:
        at = min(int(x.scheduled_s / step_s), steps - 1)
        sent[at] += 1
        failed[at] += timed is None
        if x.chunk_s:
            chunk_s += x.chunk_s
            tokens += weights(x)
        if timed is not None:
            ttft[at].append(timed.ttft_s)
            if timed.tpot_s is not None:
                tpot[at].append(timed.tpot_s)
    begins = np.array([x.scheduled_s for x, _ in exchanges])
    ends = np.array([end_s if x.ended_s is None else x.ended_s for x, _ in exchanges])
    in_air = np.diff([np.clip(edge, begins, ends).sum() for edge in edges])
    places = np.minimum(np.searchsorted(edges, chunk_s, side="right") - 1, steps - 1)
    tokens_by_step = np.bincount(places, tokens, steps)
    return RunTimeline(
        step_s=step_s,
        at_s=[round(float(at), 6) for at in edges[:-1]],
        concurrency=(in_air / step_s).round(4).tolist(),
        sent_per_s=(sent / step_s).tolist(),
        output_tokens_per_s=(tokens_by_step / step_s).tolist(),
        failed_per_s=(failed / step_s).tolist(),
        ttft_p50_s=[percentile(values, 50) for values in ttft],
        ttft_p99_s=[percentile(values, 99) for values in ttft],
        tpot_p50_s=[percentile(values, 50) for values in tpot],
    )


def percentile(values: list[float], share: float) -> float | None:
    """Return a percentile, linear between neighbours, to the bit as numpy's; None of no values.

    numpy takes 50 µs for a handful of values.

    >>> percentile([4.0, 1.0, 2.0], 75), percentile([], 50)
    (3.0, None)
    """
    if not values:
        return None
    values, place = sorted(values), (len(values) - 1) * (share / 100)
    at = int(place)
    low, high, part = values[at], values[min(at + 1, len(values) - 1)], place - at
    return high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part


def weights(x: Exchange) -> list[float]:
    """Return the tokens of each chunk: as the server says, else equal parts of the answer."""
    if x.chunk_tokens is not None:
        return [*x.chunk_tokens]
    return [x.num_output / len(x.chunk_s)] * len(x.chunk_s)


def tokens_of(x: Exchange) -> float:
    """Return the received tokens of one answer."""
    if not x.chunk_s:
        return 0.0
    return float(x.num_output if x.chunk_tokens is None else sum(x.chunk_tokens))


def tokens_in(x: Exchange, from_s: float, to_s: float) -> float:
    """Return the tokens of one answer that were received in [from_s, to_s]."""
    if not x.chunk_s:
        return 0.0
    if from_s <= min(x.chunk_s) and max(x.chunk_s) <= to_s:
        return tokens_of(x)
    return sum([w for at_s, w in zip(x.chunk_s, weights(x)) if from_s <= at_s <= to_s])
