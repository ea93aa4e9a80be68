"""What will be asked: a trace, or a few percentiles, as traffic that can be simulated.

Percentiles become a curve through the given points: straight from one to the next in the logarithm
of the length over the normal score of the share, its ends continued, its tail cut at the context.
Worked example, p50=100, p95=1000: the median is 100, one of twenty is longer than 1,000; with
p99=1100 the tail is short from there on, which a lognormal through the first two would not know.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headway.bench.prompts import Made
from headway.bench.run import Bench
from headway.bench.workload import Conversation, Traffic, Turn, rate_of
from headway.config.options.field import TIME_SUFFIXES
from headway.config.options.plan import PlanOptions
from headway.core.errors import UsageError

EXAMPLE = "Write p50=800,p95=4000,p99=9000."
BURST = re.compile(r"(\d+(?:\.\d+)?)x:(\d+(?:\.\d+)?)(ms|s|m|h)/(\d+(?:\.\d+)?)(ms|s|m|h)")
GROUPS = 8
"""Different beginnings that prompts share, where nobody says how many."""
SCORE = NormalDist().inv_cdf
PER_CLIENT, LEAST_REQUESTS = 10, 400
"""Requests of each client of a closed loop, and of all of them, that are simulated."""
AGAIN_S = 5.0
"""People who ask once more do so after this long, in the mean."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Traffic with its peak in it, the rates, the lengths that decide, and what was assumed."""

    conversations: list[Conversation]
    span_s: float
    mean_rate: float
    peak_rate: float
    prompt_p95: int
    prompt_p99: int
    answer_p50: int
    answer_p99: int
    at_once: int | None = None
    """So many requests at a time, each sent when another is answered; None: they have a rate."""
    assumed: list[str] = field(default_factory=list)


def parse_percentiles(text: str, option: str, most: int) -> dict[float, int]:
    """`p50=800,p95=4000` → {0.5: 800, 0.95: 4000}; UsageError names what is wrong."""
    found: dict[float, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*p(\d{1,2}(?:\.\d+)?)\s*=\s*(\d+)\s*", part)
        if match is None or not 0 < float(match[1]) < 100:
            raise UsageError(f"{option}: {part.strip()!r} is no percentile.", EXAMPLE)
        share, length = float(match[1]) / 100, int(match[2])
        if share in found:
            raise UsageError(f"{option}: p{match[1]} is given twice.", EXAMPLE)
        if not 1 <= length <= most:
            raise UsageError(
                f"{option}: p{match[1]} is {length} tokens; the context has {most}.",
                "Give lengths from 1 to the context.",
            )
        found[share] = length
    if len(found) < 2:
        raise UsageError(f"{option}: one percentile says nothing of the others.", EXAMPLE)
    ordered = sorted(found.items())
    for (low, shorter), (high, longer) in pairwise(ordered):
        if shorter > longer:
            raise UsageError(
                f"{option}: p{100 * low:g} is {shorter} and p{100 * high:g} only {longer}.",
                "Percentiles rise.",
            )
    return dict(ordered)


def lengths_by(percentiles: dict[float, int], shares: Floats, most: int) -> NDArray[np.int64]:
    """The lengths at these shares of the requests."""
    scores = np.array([SCORE(share) for share in percentiles])
    logs = np.log(np.array(list(percentiles.values()), dtype=float))
    wanted = np.array([SCORE(float(share)) for share in shares])
    found = np.interp(wanted, scores, logs)
    for end, other in ((0, 1), (-1, -2)):
        slope = (logs[end] - logs[other]) / (scores[end] - scores[other])
        beyond = wanted < scores[0] if end == 0 else wanted > scores[-1]
        found[beyond] = logs[end] + slope * (wanted[beyond] - scores[end])
    lengths: NDArray[np.int64] = np.clip(np.rint(np.exp(found)), 1, most).astype(np.int64)
    return lengths


def drawn(rng: np.random.Generator, count: int) -> Floats:
    """`count` shares, one from each of as many equal parts of (0, 1), in a drawn order: the
    percentiles of the traffic are those that were asked for, also of a few hundred requests."""
    shares: Floats = (np.arange(count) + rng.uniform(0.02, 0.98, count)) / count
    return rng.permutation(shares)


@dataclass(frozen=True, slots=True)
class Burst:
    """So many times the rate for `seconds` in every `period_s`; (1, 0, 1) is none."""

    times: float
    seconds: float
    period_s: float


def parse_burst(text: str) -> Burst:
    """`3x:30s/10m` → three times the rate for 30 s in every 10 minutes."""
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
    """`0.4:1500` → (0.4, 1500)."""
    if not text:
        return 0.0, None
    share, _, tokens = text.partition(":")
    try:
        found = float(share), int(tokens) if tokens else None
    except ValueError:
        found = -1.0, None
    if not 0 <= found[0] < 1 or (found[1] is not None and found[1] < 1):
        raise UsageError(f"--cacheable: {text!r} is no share.", "Write 0.4 or 0.4:1500.")
    return found


def demand_of(bench: Bench, options: PlanOptions, context: int) -> Demand:
    """The traffic that the options describe; raises UsageError."""
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
    """Who asks when he has his answer has no peaks, and does not ask twice."""
    for name in ("burst", "retries"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is about a rate; so many requests at once come as fast as they are "
                "answered.",
                "Give --rate in place of --concurrency, or leave it out.",
            )


def from_percentiles(bench: Bench, options: PlanOptions, context: int) -> Demand:
    """Traffic through the given percentiles: a calm, a burst, and what it leaves behind."""
    load = bench.options
    prompts = parse_percentiles(options.prompts, "--prompts", context - 1)
    answers = parse_percentiles(options.answers, "--answers", context - 1)
    burst = parse_burst(options.burst)
    rate = rate_of(load) * options.growth
    rng = np.random.default_rng([load.seed, 29])
    if load.concurrency is None:
        times, from_s = arrivals(rate, burst, options.most_requests, rng)
    else:
        wanted = max(PER_CLIENT * load.concurrency, LEAST_REQUESTS)
        times, from_s = [0.0] * min(wanted, options.most_requests), 0.0
    limit = options.most_requests
    assumed = ["percentiles of prompts and answers are independent of each other"]
    p_lengths = lengths_by(prompts, drawn(rng, len(times)), context - 1)
    a_lengths = lengths_by(answers, drawn(rng, len(times)), context - 1)
    a_lengths = np.minimum(a_lengths, context - p_lengths)
    share, tokens = parse_cacheable(options.cacheable)
    begins, said = beginnings(share, tokens, p_lengths, rng)
    assumed += said
    talks = [
        talk(i, at_s, int(p_lengths[i]), int(a_lengths[i]), begins[i])
        for i, at_s in enumerate(times[:limit])
    ]
    return finished(bench, options, talks, from_s, assumed, peak=rate * burst.times, mean=rate)


def arrivals(
    rate: float, burst: Burst, most: int, rng: np.random.Generator
) -> tuple[list[float], float]:
    """When about `most` requests come, and over how long: calm, a burst, and half as long calm."""
    calm_s = most / 3 / rate
    length_s = min(burst.seconds, most * 2 / 3 / (rate * burst.times))
    times, from_s = list[float](), 0.0
    parts = [(calm_s, rate), (length_s, rate * burst.times), (calm_s / 2, rate)]
    for seconds, part_rate in parts:
        count = rng.poisson(seconds * part_rate)
        times += (from_s + np.sort(rng.uniform(0, seconds, count))).tolist()
        from_s += seconds
    return times, from_s


def beginnings(
    share: float, tokens: int | None, lengths: NDArray[np.int64], rng: np.random.Generator
) -> tuple[list[tuple[str, int]], list[str]]:
    """By request (name of its beginning, tokens of it), so that `share` of all is shared."""
    none = [("", 0)] * len(lengths)
    if not share:
        return none, []
    each = np.minimum(tokens or int(np.median(lengths)), lengths - 1)
    with_it = min(share * lengths.sum() / max(each.sum(), 1), 1.0)
    names = rng.integers(GROUPS, size=len(lengths))
    has = rng.random(len(lengths)) < with_it
    found = [(f"group {n}", int(e)) if h else ("", 0) for n, e, h in zip(names, each, has)]
    reached = float((each * has).sum() / lengths.sum())
    return found, [
        f"{reached:.0%} of prompt tokens lie in {GROUPS} shared beginnings of "
        f"{tokens or int(np.median(lengths))} tokens"
    ]


def talk(
    number: int, at_s: float, prompt: int, answer: int, begins: tuple[str, int]
) -> Conversation:
    """One request of one turn."""
    name, shared = begins
    system = (Made(name, shared),) if shared else ()
    own = (Made(f"request {number}", max(prompt - shared, 1)),)
    turn = Turn(system=system, prompt=own, output_tokens=max(answer, 1))
    return Conversation(at_s=at_s, turns=(turn,))


def from_traffic(bench: Bench, options: PlanOptions) -> Demand:
    """A workload's own traffic: of a long one the busiest stretch, and its mean beside it."""
    if bench.options.concurrency is not None:
        talks = bench.traffic.conversations[: options.most_requests]
        return finished(bench, options, talks, 0.0, [], peak=0.0, mean=0.0)
    traffic = hurried(bench.traffic, options.growth)
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
    return finished(bench, options, talks, span_s, assumed, peak=len(talks) / span_s, mean=mean)


def hurried(traffic: Traffic, times: float) -> Traffic:
    """The same requests in so many times less time."""
    return replace(
        traffic,
        conversations=[replace(talk, at_s=talk.at_s / times) for talk in traffic.conversations],
        span_s=traffic.span_s / times,
    )


def finished(
    bench: Bench,
    options: PlanOptions,
    talks: list[Conversation],
    span_s: float,
    assumed: list[str],
    *,
    peak: float,
    mean: float,
) -> Demand:
    """The demand with those who ask again, and the lengths that decide."""
    if not talks:
        raise UsageError("No request falls into the time.", "Raise --rate.")
    if options.retries:
        rng = np.random.default_rng([bench.options.seed, 31])
        again = [
            replace(talk, at_s=talk.at_s + float(rng.exponential(AGAIN_S)))
            for talk in talks
            if rng.random() < options.retries
        ]
        talks = sorted([*talks, *again], key=lambda talk: talk.at_s)
        assumed = [*assumed, f"{len(again)} of the requests are sent once more"]
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
    return Demand(
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
