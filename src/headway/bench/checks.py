"""Checks of a report: identities, the client's own load, and over-saturation.

A check is passed, failed, or not applicable (`passed` None) with the reason. A failed one means
that a figure of the report cannot be trusted, and it is printed before all figures.
"""

import math

import msgspec

from headway.bench.latency import Latency
from headway.bench.percentiles import Distribution, distribution, slope
from headway.bench.timeline import RunTimeline, tokens_of
from headway.measure.record import Exchange, LoadRecord, RecordedRun

MAX_LAG_S = 0.010
MAX_LAG_SHARE = 0.05
"""The client may be late by 10 ms, or by 5% of the median TTFT where that is more (p99)."""
MAX_CPU_SHARE = 0.85
EPSILON_S = 1e-6
MIN_GROWTH = 0.5
MIN_CORRELATION = 0.5
"""Over-saturated: concurrency and TTFT both grow by half of their mean in the window, steadily."""

CEILING_NOTE = (
    "the ceiling, the best that the server measured at its start and in idle moments, is too low, "
    "as on a machine that other work keeps busy, or the weights stay in the CPU's cache; bench "
    "again on a quiet machine"
)
TimedExchange = tuple[Exchange, Latency | None]


class Check(msgspec.Struct, kw_only=True):
    """One check and its detail."""

    name: str
    passed: bool | None
    detail: str


class ClientVerdict(msgspec.Struct, kw_only=True):
    """Whether the client was the bottleneck, and why."""

    bottleneck: bool
    lag_p99_s: float
    loop_late_p99_s: float
    cpu_share: float
    why: str


class Saturation(msgspec.Struct, kw_only=True):
    """Whether more was sent than the server can take; slopes per second of the run."""

    over_saturated: bool | None
    concurrency_per_s: float
    ttft_per_s: float
    why: str


def run_checks(
    run: RecordedRun,
    timed: list[TimedExchange],
    counted: list[TimedExchange],
    times: RunTimeline,
    client: ClientVerdict,
) -> list[Check]:
    """Return all checks of a run."""
    return [
        itl_identity(counted),
        no_gap_negative(counted),
        tokens_in_chunks(counted),
        tokens_add_up(run, timed, times),
        ratio_at_most_one(run, "MBU", "mbu_ratio"),
        ratio_at_most_one(run, "MFU", "mfu_ratio"),
        Check(name="the client kept up", passed=not client.bottleneck, detail=client.why),
    ]


def itl_identity(counted: list[TimedExchange]) -> Check:
    """Check Σ ITL = e2e − TTFT and one ITL less than tokens, where the tokens of chunks are
    known."""
    name = "sum of ITLs = e2e − TTFT, ITLs = tokens − 1"
    exact = [(x, t) for x, t in counted if t is not None and t.exact]
    if not exact:
        return Check(
            name=name, passed=None, detail="the server does not say how many tokens a chunk holds"
        )
    wrong = [
        x.id
        for x, t in exact
        if abs(sum(t.gaps_s) - (t.e2e_s - t.ttft_s)) > EPSILON_S
        or len(t.gaps_s) != x.num_output - 1
    ]
    return verdict(name, wrong, len(exact))


def no_gap_negative(counted: list[TimedExchange]) -> Check:
    """Check that no latency and no gap is negative."""
    timed = [(x, t) for x, t in counted if t is not None]
    wrong = [x.id for x, t in timed if t.ttft_s < 0 or min(t.gaps_s, default=0.0) < 0]
    return verdict("no gap is negative", wrong, len(timed))


def tokens_in_chunks(counted: list[TimedExchange]) -> Check:
    """Check that the tokens in chunks are those of the usage."""
    name = "tokens in chunks = usage"
    both = [
        x
        for x, t in counted
        if t is not None and x.chunk_tokens is not None and x.output_tokens is not None
    ]
    if not both:
        return Check(name=name, passed=None, detail="the server does not report both")
    wrong = [x.id for x in both if sum(x.chunk_tokens or ()) != x.output_tokens]
    return verdict(name, wrong, len(both))


def verdict(name: str, wrong: list[int], total: int) -> Check:
    """Return a check that is passed when no request is wrong."""
    shown = ", ".join(map(str, wrong[:5]))
    detail = f"{total} requests" if not wrong else f"{len(wrong)} of {total} differ: {shown}"
    return Check(name=name, passed=not wrong, detail=detail)


def tokens_add_up(run: RecordedRun, timed: list[TimedExchange], times: RunTimeline) -> Check:
    """Check that throughput × time over the steps of the timeline is the number of received
    tokens."""
    total = sum([tokens_of(x) for x, _ in timed])
    rated = sum(times.output_tokens_per_s) * times.step_s
    return Check(
        name="sum of tokens = throughput × time",
        passed=abs(total - rated) <= 1e-6 * max(total, 1.0),
        detail=f"{total:.0f} tokens came, {rated:.0f} by the timeline",
    )


def ratio_at_most_one(run: RecordedRun, name: str, gauge: str) -> Check:
    """Check a utilization: above 1 its ceiling or its count is wrong; it is never clamped."""
    values = [
        value
        for kind, samples in run.server.gauges.items()
        if kind.startswith(gauge)
        for value in samples
        if value is not None and not math.isnan(value)
    ]
    if not values:
        return Check(name=f"{name} ≤ 1", passed=None, detail="the server does not report it")
    detail, passed = f"at most {max(values):.3f} in the run", max(values) <= 1
    return Check(
        name=f"{name} ≤ 1", passed=passed, detail=detail if passed else f"{detail}: {CEILING_NOTE}"
    )


def client_verdict(
    run: RecordedRun, lag: Distribution | None, ttft: Distribution | None
) -> ClientVerdict:
    """Return the verdict on the client: a bottleneck when it sent late or had no CPU left."""
    late = distribution(run.client.late_s)
    lag_p99_s = lag.p99 if lag else 0.0
    late_p99_s = late.p99 if late else 0.0
    cpu = run.client.cpu_s / max(run.client.wall_s, 1e-9)
    limit_s = max(MAX_LAG_S, MAX_LAG_SHARE * (ttft.p50 if ttft else 0.0))
    reasons = []
    if lag_p99_s > limit_s:
        reasons.append(f"requests left up to {lag_p99_s * 1e3:.1f} ms late (p99)")
    if late_p99_s > limit_s:
        reasons.append(f"chunks were read up to {late_p99_s * 1e3:.1f} ms late (p99)")
    if cpu > MAX_CPU_SHARE:
        reasons.append(f"it used {cpu:.0%} of a core")
    summary = (
        f"lag p99 {lag_p99_s * 1e3:.1f} ms, loop p99 {late_p99_s * 1e3:.1f} ms, {cpu:.0%} of a core"
    )
    return ClientVerdict(
        bottleneck=bool(reasons),
        lag_p99_s=lag_p99_s,
        loop_late_p99_s=late_p99_s,
        cpu_share=cpu,
        why="The client was the bottleneck: " + "; ".join(reasons) if reasons else summary,
    )


def saturation(load: LoadRecord, counted: list[TimedExchange], times: RunTimeline) -> Saturation:
    """Return whether concurrency and TTFT rise through the whole window."""
    if load.loop == "closed":
        return Saturation(
            over_saturated=None,
            concurrency_per_s=0.0,
            ttft_per_s=0.0,
            why="closed loop: the load adapts to the server",
        )
    to_s = min(load.to_s, load.span_s)
    window_s = to_s - load.from_s
    points = [
        (at_s, value)
        for at_s, value in zip(times.at_s, times.concurrency)
        if load.from_s <= at_s and at_s + times.step_s <= to_s + 1e-9
    ]
    busy, together = slope([p[0] for p in points], [p[1] for p in points])
    timed = [(x.scheduled_s, t.ttft_s) for x, t in counted if t is not None]
    wait, waiting = slope([p[0] for p in timed], [p[1] for p in timed])
    mean_busy = sum(p[1] for p in points) / max(len(points), 1)
    mean_wait = sum(p[1] for p in timed) / max(len(timed), 1)
    grows = (
        busy * window_s > MIN_GROWTH * mean_busy and together > MIN_CORRELATION and mean_busy > 1
    )
    slower = wait * window_s > MIN_GROWTH * mean_wait and waiting > MIN_CORRELATION
    rising = (
        f"concurrency {busy * window_s:+.1f} around {mean_busy:.1f} and TTFT "
        f"{wait * window_s:+.3f} s around {mean_wait:.3f} s over the window"
    )
    over = grows and slower
    return Saturation(
        over_saturated=over,
        concurrency_per_s=busy,
        ttft_per_s=wait,
        why=f"Over-saturated: {rising}; figures depend on how long the run is." if over else rising,
    )
