"""Demand: a trace, or a few percentiles, as traffic that can be simulated.

Percentiles become a curve through the given points: piecewise linear in the logarithm of the length
over the normal score of the share, extended at both ends, cut at the context. Worked example,
p50=100, p95=1000: the median is 100, one of twenty prompts is longer than 1,000; with p99=1100 the
tail is short from there on, which a lognormal through the first two points would miss.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headway.bench.prompts import GeneratedPiece
from headway.bench.run import Bench
from headway.bench.workload import Conversation, Traffic, Turn, rate_of
from headway.config.options.field import TIME_SUFFIXES
from headway.config.options.plan import PlanOptions
from headway.core.errors import UsageError

EXAMPLE = "Write p50=800,p95=4000,p99=9000."
BURST = re.compile(r"(\d+(?:\.\d+)?)x:(\d+(?:\.\d+)?)(ms|s|m|h)/(\d+(?:\.\d+)?)(ms|s|m|h)")
NUM_PREFIX_GROUPS = 8
"""Number of different shared prefixes where the options give none."""
SCORE = NormalDist().inv_cdf
REQUESTS_PER_CLIENT, MIN_REQUESTS = 10, 400
"""Simulated requests of each client of a closed loop, and least number of them in all."""
RETRY_MEAN_S = 5.0
"""Mean seconds after which a user sends a request again."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDemand:
    """Traffic with its peak in it, the rates, the lengths that decide, and the assumptions."""

    conversations: list[Conversation]
    span_s: float
    mean_rate: float
    peak_rate: float
    prompt_p95: int
    prompt_p99: int
    answer_p50: int
    answer_p99: int
    at_once: int | None = None
    """Number of concurrent requests of a closed loop; None where requests have a rate."""
    assumed: list[str] = field(default_factory=list)


def parse_percentiles(text: str, option: str, most: int) -> dict[float, int]:
    """Parse `p50=800,p95=4000` → {0.5: 800, 0.95: 4000}; UsageError names what is wrong."""
    lengths: dict[float, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*p(\d{1,2}(?:\.\d+)?)\s*=\s*(\d+)\s*", part)
        if match is None or not 0 < float(match[1]) < 100:
            raise UsageError(f"{option}: {part.strip()!r} is no percentile.", EXAMPLE)
        share, length = float(match[1]) / 100, int(match[2])
        if share in lengths:
            raise UsageError(f"{option}: p{match[1]} is given twice.", EXAMPLE)
        if not 1 <= length <= most:
            raise UsageError(
                f"{option}: p{match[1]} is {length} tokens; the context has {most}.",
                "Give lengths from 1 to the context.",
            )
        lengths[share] = length
    if len(lengths) < 2:
        raise UsageError(f"{option}: one percentile says nothing of the others.", EXAMPLE)
    ordered = sorted(lengths.items())
    for (low, shorter), (high, longer) in pairwise(ordered):
        if shorter > longer:
            raise UsageError(
                f"{option}: p{100 * low:g} is {shorter} and p{100 * high:g} only {longer}.",
                "Percentiles rise.",
            )
    return dict(ordered)


def lengths_by(percentiles: dict[float, int], shares: Floats, most: int) -> NDArray[np.int64]:
    """Return the lengths at these shares of the requests."""
    given_scores = np.array([SCORE(share) for share in percentiles])
    given_logs = np.log(np.array(list(percentiles.values()), dtype=float))
    target_scores = np.array([SCORE(float(share)) for share in shares])
    log_lengths = np.interp(target_scores, given_scores, given_logs)
    for end, other in ((0, 1), (-1, -2)):
        slope = (given_logs[end] - given_logs[other]) / (given_scores[end] - given_scores[other])
        beyond = target_scores < given_scores[0] if end == 0 else target_scores > given_scores[-1]
        log_lengths[beyond] = given_logs[end] + slope * (target_scores[beyond] - given_scores[end])
    lengths: NDArray[np.int64] = np.clip(np.rint(np.exp(log_lengths)), 1, most).astype(np.int64)
    return lengths


def stratified_shares(rng: np.random.Generator, count: int) -> Floats:
    """Return `count` shares, one from each of as many equal parts of (0, 1), in random order.

    So the percentiles of a few hundred requests are those that were asked for.
    """
    shares: Floats = (np.arange(count) + rng.uniform(0.02, 0.98, count)) / count
    return rng.permutation(shares)


@dataclass(frozen=True, slots=True)
class Burst:
    """`times` the rate for `seconds` in every `period_s`; (1, 0, 1) is no burst."""

    times: float
    seconds: float
    period_s: float


def parse_burst(text: str) -> Burst:
    """Parse `3x:30s/10m`: three times the rate for 30 s in every 10 minutes."""
    if not text:
        return Burst(1.0, 0.0, 1.0)
    match = BURST.fullmatch(text)
    if match is None:
        raise UsageError(f"--burst: {text!r} is no burst.", "Write 3x:30s/10m.")
    seconds = float(match[2]) * TIME_SUFFIXES[match[3]]
    period_s = float(match[4]) * TIME_SUFFIXES[match[5]]
    times = float(match[1])
    if times < 1 or not 0 < seconds < period_s:
        raise UsageError(
            f"--burst {text}: it is shorter than its period and at least 1x.", "Write 3x:30s/10m."
        )
    return Burst(times, seconds, period_s)


def parse_cacheable(text: str) -> tuple[float, int | None]:
    """Parse `0.4:1500` → (0.4, 1500)."""
    if not text:
        return 0.0, None
    share, _, tokens = text.partition(":")
    try:
        parsed = float(share), int(tokens) if tokens else None
    except ValueError:
        parsed = -1.0, None
    if not 0 <= parsed[0] < 1 or (parsed[1] is not None and parsed[1] < 1):
        raise UsageError(f"--cacheable: {text!r} is no share.", "Write 0.4 or 0.4:1500.")
    return parsed


def demand_of(bench: Bench, options: PlanOptions, context: int) -> PlannedDemand:
    """Return the traffic that the options describe; raise UsageError."""
    if bench.options.concurrency is not None:
        refuse_rates(options)
    if bool(options.prompts) != bool(options.answers):
        raise UsageError("--prompts and --answers belong together.", EXAMPLE)
    if options.prompts:
        return from_percentiles(bench, options, context)
    for name in ("burst", "cacheable"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} describes percentiles; a workload has its own.",
                "Give --prompts and --answers, or leave it out.",
            )
    return from_traffic(bench, options)


def refuse_rates(options: PlanOptions) -> None:
    """Raise UsageError for options that describe a rate: a closed loop has no peaks and no
    repeats."""
    for name in ("burst", "retries"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} needs a rate; a closed loop sends a request when another is answered.",
                "Give --rate in place of --concurrency, or leave it out.",
            )


def from_percentiles(bench: Bench, options: PlanOptions, context: int) -> PlannedDemand:
    """Return traffic through the given percentiles: a calm time, a burst, and its aftermath."""
    load = bench.options
    prompts = parse_percentiles(options.prompts, "--prompts", context - 1)
    answers = parse_percentiles(options.answers, "--answers", context - 1)
    burst = parse_burst(options.burst)
    rate = rate_of(load) * options.growth
    rng = np.random.default_rng([load.seed, 29])
    if load.concurrency is None:
        times, from_s = burst_arrivals(rate, burst, options.most_requests, rng)
    else:
        num_requests = max(REQUESTS_PER_CLIENT * load.concurrency, MIN_REQUESTS)
        times, from_s = [0.0] * min(num_requests, options.most_requests), 0.0
    limit = options.most_requests
    assumed = ["percentiles of prompts and answers are independent of each other"]
    p_lengths = lengths_by(prompts, stratified_shares(rng, len(times)), context - 1)
    a_lengths = lengths_by(answers, stratified_shares(rng, len(times)), context - 1)
    a_lengths = np.minimum(a_lengths, context - p_lengths)
    share, tokens = parse_cacheable(options.cacheable)
    begins, notes = shared_prefixes(share, tokens, p_lengths, rng)
    assumed += notes
    talks = [
        one_turn_conversation(i, at_s, int(p_lengths[i]), int(a_lengths[i]), begins[i])
        for i, at_s in enumerate(times[:limit])
    ]
    return build_demand(bench, options, talks, from_s, assumed, peak=rate * burst.times, mean=rate)


def burst_arrivals(
    rate: float, burst: Burst, most: int, rng: np.random.Generator
) -> tuple[list[float], float]:
    """Return the arrival times of about `most` requests, and the duration: calm, a burst, half as
    long calm."""
    calm_s = most / 3 / rate
    length_s = min(burst.seconds, most * 2 / 3 / (rate * burst.times))
    times, from_s = list[float](), 0.0
    parts = [(calm_s, rate), (length_s, rate * burst.times), (calm_s / 2, rate)]
    for seconds, part_rate in parts:
        count = rng.poisson(seconds * part_rate)
        times += (from_s + np.sort(rng.uniform(0, seconds, count))).tolist()
        from_s += seconds
    return times, from_s


def shared_prefixes(
    share: float, tokens: int | None, lengths: NDArray[np.int64], rng: np.random.Generator
) -> tuple[list[tuple[str, int]], list[str]]:
    """Return, by request, (name of its prefix, tokens of it), so that `share` of all tokens is
    shared."""
    none = [("", 0)] * len(lengths)
    if not share:
        return none, []
    each = np.minimum(tokens or int(np.median(lengths)), lengths - 1)
    with_it = min(share * lengths.sum() / max(each.sum(), 1), 1.0)
    names = rng.integers(NUM_PREFIX_GROUPS, size=len(lengths))
    has = rng.random(len(lengths)) < with_it
    prefixes = [(f"group {n}", int(e)) if h else ("", 0) for n, e, h in zip(names, each, has)]
    reached = float((each * has).sum() / lengths.sum())
    return prefixes, [
        f"{reached:.0%} of prompt tokens lie in {NUM_PREFIX_GROUPS} shared beginnings of "
        f"{tokens or int(np.median(lengths))} tokens"
    ]


def one_turn_conversation(
    number: int, at_s: float, prompt: int, answer: int, begins: tuple[str, int]
) -> Conversation:
    """Return a conversation of one request."""
    name, shared = begins
    system = (GeneratedPiece(name, shared),) if shared else ()
    own = (GeneratedPiece(f"request {number}", max(prompt - shared, 1)),)
    turn = Turn(system=system, prompt=own, output_tokens=max(answer, 1))
    return Conversation(at_s=at_s, turns=(turn,))


def from_traffic(bench: Bench, options: PlanOptions) -> PlannedDemand:
    """Return a workload's own traffic: of a long one the busiest stretch, and the mean rate of
    all."""
    if bench.options.concurrency is not None:
        talks = bench.traffic.conversations[: options.most_requests]
        return build_demand(bench, options, talks, 0.0, [], peak=0.0, mean=0.0)
    traffic = sped_up(bench.traffic, options.growth)
    talks = traffic.conversations
    mean = len(talks) / traffic.span_s
    assumed = []
    if len(talks) > options.most_requests:
        times = np.array([talk.at_s for talk in talks])
        spans = times[options.most_requests - 1 :] - times[: 1 - options.most_requests]
        first = int(np.argmin(spans))
        talks = talks[first : first + options.most_requests]
        assumed.append(
            f"the busiest {options.most_requests} requests in a row are planned for, "
            f"{spans[first]:.0f} of {traffic.span_s:.0f} s"
        )
    from_s = talks[0].at_s
    span_s = max(talks[-1].at_s - from_s, 1e-6)
    talks = [replace(talk, at_s=talk.at_s - from_s) for talk in talks]
    return build_demand(bench, options, talks, span_s, assumed, peak=len(talks) / span_s, mean=mean)


def sped_up(traffic: Traffic, times: float) -> Traffic:
    """Return the same requests at `times` the rate."""
    return replace(
        traffic,
        conversations=[replace(talk, at_s=talk.at_s / times) for talk in traffic.conversations],
        span_s=traffic.span_s / times,
    )


def build_demand(
    bench: Bench,
    options: PlanOptions,
    talks: list[Conversation],
    span_s: float,
    assumed: list[str],
    *,
    peak: float,
    mean: float,
) -> PlannedDemand:
    """Return the demand with the repeated requests, and the lengths that decide."""
    if not talks:
        raise UsageError("No request falls into the time.", "Raise --rate.")
    if options.retries:
        rng = np.random.default_rng([bench.options.seed, 31])
        retried = [
            replace(
                talk,
                at_s=talk.at_s + float(rng.exponential(RETRY_MEAN_S)),
            )
            for talk in talks
            if rng.random() < options.retries
        ]
        talks = sorted([*talks, *retried], key=lambda talk: talk.at_s)
        assumed = [*assumed, f"{len(retried)} of the requests are sent again"]
        peak, mean = peak * (1 + options.retries), mean * (1 + options.retries)
    concurrency, at_once = bench.options.concurrency, None
    if concurrency is not None:
        peak = mean = 0.0
        at_once = ceil(options.growth * concurrency)
        if len(talks) < 2 * at_once:
            raise UsageError(
                f"{len(talks):,} requests are too few to simulate {at_once:,} at once.",
                "Raise --most-requests, give a longer workload, or lower --concurrency.",
            )
    turns = [turn for talk in talks for turn in talk.turns]
    prompts = [sum(piece.tokens for piece in turn.system + turn.prompt) for turn in turns]
    outputs = [turn.output_tokens for turn in turns]
    return PlannedDemand(
        conversations=talks,
        span_s=span_s,
        mean_rate=mean,
        peak_rate=peak,
        prompt_p95=int(np.percentile(prompts, 95)),
        prompt_p99=int(np.percentile(prompts, 99)),
        answer_p50=int(np.percentile(outputs, 50)),
        answer_p99=int(np.percentile(outputs, 99)),
        at_once=at_once,
        assumed=assumed,
    )
