"""Claims about a server under load: what patience buys, what tokens cost, what being busy says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.measure.plot import Plot
from literature.asking import Asking, Body, TimedAnswer
from literature.claim import (
    Claim,
    Figure,
    Finding,
    Promise,
    bootstrap,
    median_of,
    ratio_of,
    share_of,
)
from literature.pictures import groups, lines
from literature.subject import Subject

LINKEDIN = "LinkedIn, Musings on building a Generative AI product (2024)"
ANYSCALE = "Anyscale, Reproducible Performance Metrics for LLM inference (2023)"
LEVELS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, ANSWER = 96, 48
FEELS_ALIKE = 2.0
"""Up to so many times what a request takes alone, both its waits, a user notices little."""
BUSY_S, HALF, OVER = 8.0, 0.5, 1.6
SLACK = 1.5
"""Objectives are so many times the p95 at half the load."""


@dataclass(frozen=True, slots=True)
class Level:
    """What so many requests at once came to: output tokens a second by repeat, and the waits."""

    at_once: int
    rates: list[float]
    requests_s: float
    ttft_s: float
    tpot_s: float


def level(asking: Asking, at_once: int, rounds: int, seed: int) -> Level:
    """`rounds` of several times so many requests, all unseen, so many at a time."""
    rates, requests, all_asked = [], [], []
    for number in range(rounds):
        bodies = [
            Body(prompt=asking.text(PROMPT, 1000 * seed + 100 * number + i), tokens=ANSWER)
            for i in range(max(4, 2 * at_once))
        ]
        asked = asking.all(bodies, at_once)
        took_s = max(a.sent_s + a.e2e_s for a in asked) - min(a.sent_s for a in asked)
        rates.append(sum(a.output for a in asked) / took_s)
        requests.append(len(asked) / took_s)
        all_asked += asked
    return Level(
        at_once,
        rates,
        float(np.median(requests)),
        float(np.median([a.ttft_s for a in all_asked])),
        float(np.median([a.tpot_s for a in all_asked if a.tpot_s is not None])),
    )


def levels(subject: Subject) -> list[Level]:
    """All levels once; a round at the smallest first, to warm up."""
    asking = subject.server()
    level(asking, 4, 1, seed=9)
    found = []
    for number, at_once in enumerate(LEVELS):
        subject.watch(f"{at_once} requests at once")
        found.append(level(asking, at_once, max(2, subject.repeats // 3), seed=10 + number))
    return found


def trade(subject: Subject) -> Finding:
    """Throughput with patience over that where a request feels nearly as if it were alone."""
    found = subject.once(levels)
    quick = [each for each in found if feels_alike(each, found[0])][-1]
    patient = max(found, key=lambda each: float(np.median(each.rates)))
    return Finding(
        figures=[
            ratio_of("throughput for who waits", patient.rates, quick.rates),
            Figure(name="TTFT then", value=patient.ttft_s / quick.ttft_s, unit="x"),
            Figure(name="TPOT then", value=patient.tpot_s / quick.tpot_s, unit="x"),
            median_of(f"{quick.at_once} at once", quick.rates, " tok/s"),
            median_of(f"{patient.at_once} at once", patient.rates, " tok/s"),
        ],
        promise=Promise(low=2.0),
        why=f"Up to {quick.at_once} at once both waits stay within twice those of one alone; the "
        f"most tokens come at {patient.at_once}. More than three times is possible where a step "
        "costs nearly the same for many rows.",
        picture=two_lines(found),
    )


def feels_alike(one: Level, alone: Level) -> bool:
    """Whether both waits stay near those of a request alone."""
    quick = one.ttft_s <= FEELS_ALIKE * alone.ttft_s
    return quick and one.tpot_s <= FEELS_ALIKE * alone.tpot_s


def two_lines(found: Sequence[Level]) -> Plot:
    """Tokens a second, and both waits, by requests at once."""
    rows = {
        "output tok/s": [float(np.median(each.rates)) for each in found],
        "TTFT, ms": [1e3 * each.ttft_s for each in found],
        "TPOT, ms": [1e3 * each.tpot_s for each in found],
    }
    picture = lines([each.at_once for each in found], rows, "requests at once", "tok/s")
    waits = [replace(row, right=True) for row in picture.series[1:]]
    return replace(picture, series=[picture.series[0], *waits], right="ms", log_x=True)


@dataclass(slots=True)
class Alone:
    """One request alone: seconds to the first token of short and of long prompts, which differ by
    `apart` tokens, and seconds a token after it."""

    short_s: list[float]
    long_s: list[float]
    tpot_s: list[float]
    apart: float

    def slope(self, short: Sequence[float], long: Sequence[float]) -> float:
        """Seconds an input token."""
        return max(float(np.median(long) - np.median(short)) / self.apart, 1e-9)


def alone(subject: Subject) -> Alone:
    """Prompts of two lengths, in turns, all unseen."""
    asking = subject.server()
    lengths = 64, min(1600, asking.room(32))
    asked: list[list[TimedAnswer]] = [[], []]
    for number in range(subject.repeats):
        for long in (0, 1):
            prompt = asking.text(lengths[long], 3000 + 2 * number + long)
            asked[long] += asking.all([Body(prompt=prompt, tokens=32)])
    short, long_ones = asked
    return Alone(
        [a.ttft_s for a in short],
        [a.ttft_s for a in long_ones],
        [a.tpot_s for a in short if a.tpot_s is not None],
        float(np.median([a.prompt for a in long_ones]) - np.median([a.prompt for a in short])),
    )


def hundred(subject: Subject) -> Finding:
    """The slope of TTFT over unseen prompts of two lengths, and TPOT of one request alone."""
    one = subject.once(alone)
    ends = [one.short_s, one.long_s]
    name = "input tokens that one output token is worth"
    worth = bootstrap(name, "", [*ends, one.tpot_s],
                      lambda p: float(np.median(p[2])) / one.slope(p[0], p[1]))  # fmt: skip
    inputs = bootstrap("an input token", " µs", ends, lambda p: 1e6 * one.slope(p[0], p[1]))
    return Finding(
        figures=[worth, inputs, median_of("an output token", [1e3 * s for s in one.tpot_s], " ms")],
        promise=Promise(low=70.0, high=140.0, none=10.0),
        why="It is the batch at which a step turns from reading weights to computing: about a "
        "hundred on a GPU with a large model; on a CPU, which computes little for what it reads, "
        "it is smaller, and a small model pays its step's fixed time instead.",
    )


def dearer(subject: Subject) -> Finding:
    """Tokens a second of prompts alone, and of answers alone, with many requests at once."""
    asking = subject.server()
    long = min(384, asking.room(1))
    inputs, outputs = list[float](), list[float]()
    for number in range(max(2, subject.repeats // 3)):
        asked = asking.all(unseen(asking, 48, long, 1, 5000 + 64 * number), 16)
        inputs.append(per_s(asked, lambda a: a.prompt))
        asked = asking.all(unseen(asking, 64, 8, 96, 7000 + 64 * number), 64)
        outputs.append(per_s(asked, lambda a: a.output))
    return Finding(
        figures=[
            ratio_of("an output token costs", inputs, outputs, " input tokens"),
            median_of("prompts alone", inputs, " tok/s"),
            median_of("answers alone, 64 at once", outputs, " tok/s"),
        ],
        promise=Promise(low=2.0, high=4.0),
        why="Prices of two to four for one are those of a server whose batches are full: there an "
        "output token is a row of a step as an input token is, and reads its context besides.",
    )


def unseen(asking: Asking, count: int, prompt: int, answer: int, seed: int) -> list[Body]:
    """So many requests of one size."""
    return [Body(prompt=asking.text(prompt, seed + i), tokens=answer) for i in range(count)]


def per_s(asked: Sequence[TimedAnswer], count: Callable[[TimedAnswer], int]) -> float:
    """Tokens a second of requests that were sent together."""
    took_s = max(a.sent_s + a.e2e_s for a in asked) - min(a.sent_s for a in asked)
    return sum(map(count, asked)) / took_s


@dataclass(frozen=True, slots=True)
class Offered:
    """What came of a rate: the answers, and how many were asked for."""

    asked: list[TimedAnswer]
    count: int

    def late(self, name: str, ttft_s: float, tpot_s: float) -> Figure:
        """Percent of all that missed an objective, or failed."""
        met = sum(a.ttft_s <= ttft_s and (a.tpot_s or 0) <= tpot_s for a in self.asked)
        return share_of(name, self.count - met, self.count)

    def p95(self) -> tuple[float, float]:
        """Of both waits."""
        tpots = [a.tpot_s for a in self.asked if a.tpot_s is not None]
        ttfts = [a.ttft_s for a in self.asked]
        return float(np.percentile(ttfts, 95)), float(np.percentile(tpots, 95))


def offered(subject: Subject, share: float, seed: int) -> Offered:
    """So much of what the server can do, at random times."""
    asking, found = subject.server(), subject.once(levels)
    subject.watch(f"{share:g} times what it can do")
    rate = share * max(each.requests_s for each in found)
    bodies = poisson(asking, rate, BUSY_S, seed)
    return Offered([a for a in asking.at_times(bodies) if a is not None], len(bodies))


def busy(subject: Subject) -> Finding:
    """The same server at half of what it can do and beyond it: busy share, and goodput."""
    half, over = offered(subject, HALF, 20), offered(subject, OVER, 21)
    ttft_s, tpot_s = (SLACK * wait for wait in half.p95())
    late = over.late("miss their objectives beyond capacity", ttft_s, tpot_s)
    few = half.late("miss at half of it", ttft_s, tpot_s)
    occupied = [100 * covered(each.asked) for each in (half, over)]
    return Finding(
        figures=[
            late,
            few,
            Figure(name="busy beyond capacity", value=occupied[1], unit="%"),
            Figure(name="busy at half of it", value=occupied[0], unit="%"),
        ],
        promise=Promise(low=50.0, none=5.0),
        why="Busy is the share of time in which anything ran, as a GPU's utilization is told; it "
        f"is {occupied[0]:.0f}% where nearly all are served in time and {occupied[1]:.0f}% where "
        f"they are not. Objectives: {1e3 * ttft_s:.0f} ms to the first token, "
        f"{1e3 * tpot_s:.1f} ms each.",
        picture=groups(
            ["half of capacity", "beyond capacity"],
            {"busy": occupied, "in their objectives": [100 - few.value, 100 - late.value]},
            "%",
        ),
    )


def poisson(asking: Asking, per_s: float, seconds: float, seed: int) -> list[Body]:
    """Unseen requests at random times."""
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1 / per_s, max(8, int(per_s * seconds))))
    return [
        Body(prompt=asking.text(PROMPT, 10**5 * seed + i), tokens=ANSWER, at_s=float(at_s))
        for i, at_s in enumerate(times)
    ]


def covered(asked: Sequence[TimedAnswer]) -> float:
    """The share of the time, from the first sent to the last answered, in which any was there."""
    spans = sorted((a.sent_s, a.sent_s + a.e2e_s) for a in asked)
    total, until_s = 0.0, spans[0][0]
    for from_s, to_s in spans:
        total += max(0.0, to_s - max(from_s, until_s))
        until_s = max(until_s, to_s)
    return total / max(until_s - spans[0][0], 1e-9)


CLAIMS = (
    Claim(
        key="batching-trade",
        family="Batching",
        says="Two to three times the throughput for who gives up TTFT and TPOT.",
        source=LINKEDIN,
        measure=trade,
        needs="server",
        how="1 to 64 requests at once, prompts of 96 tokens that nobody sent, answers of 48.",
    ),
    Claim(
        key="one-is-hundred",
        family="Bottlenecks",
        says="One output token costs as much latency as about 100 input tokens.",
        source=ANYSCALE,
        measure=hundred,
        needs="server",
        how="The slope of the time to the first token over the prompt's length, and the time per "
        "token of one answer alone.",
    ),
    Claim(
        key="output-price",
        family="Bottlenecks",
        says="Output tokens cost two to four times as much as input tokens.",
        source="C. Huyen, AI Engineering (2025), chapter 9; prices of common APIs",
        measure=dearer,
        needs="server",
        how="Tokens a second of prompts alone at 16 at once and of answers alone at 64.",
    ),
    Claim(
        key="busy",
        family="Bottlenecks",
        says="A server that is 100% busy may miss most objectives beside one that misses none.",
        source="C. Huyen, AI Engineering (2025), chapter 9, on utilization and goodput",
        measure=busy,
        needs="server",
        how="Requests at random times at 0.5 and 1.6 times what it can do; objectives are 1.5 "
        "times the p95 at half the load.",
    ),
)
