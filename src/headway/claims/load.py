"""Claims about a server under load: what patience buys, what tokens cost, what being busy says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headway.claims.asking import Asked, Asking, Body
from headway.claims.caching import lines
from headway.claims.claim import Claim, Figure, Finding, Promise, bootstrap, median_of
from headway.claims.subject import Subject

LINKEDIN = "LinkedIn, Musings on building a Generative AI product (2024)"
ANYSCALE = "Anyscale, Reproducible Performance Metrics for LLM inference (2023)"
LEVELS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, ANSWER = 96, 48
FEELS_ALIKE = 2.0
"""Up to so many times what a request takes alone, both its waits, a user notices little."""
BUSY_S, HALF, OVER = 8.0, 0.5, 1.6


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
    alone = found[0]
    alike = [
        each
        for each in found
        if each.ttft_s <= FEELS_ALIKE * alone.ttft_s and each.tpot_s <= FEELS_ALIKE * alone.tpot_s
    ]
    quick, patient = alike[-1], max(found, key=lambda each: float(np.median(each.rates)))
    ratio = bootstrap(
        "throughput for who waits", "x", [patient.rates, quick.rates],
        lambda parts: float(np.median(parts[0]) / np.median(parts[1])),
    )  # fmt: skip
    return Finding(
        figures=[
            ratio,
            Figure(name="TTFT then", value=patient.ttft_s / quick.ttft_s, unit="x"),
            Figure(name="TPOT then", value=patient.tpot_s / quick.tpot_s, unit="x"),
            median_of(f"{quick.at_once} at once", quick.rates, " tok/s"),
            median_of(f"{patient.at_once} at once", patient.rates, " tok/s"),
        ],
        promise=Promise(low=2.0, high=None),
        why=f"Up to {quick.at_once} at once both waits stay within twice those of one alone; the "
        f"most tokens come at {patient.at_once}. More than three times is possible where a step "
        "costs nearly the same for many rows.",
        picture=two_lines(found),
    )


def two_lines(found: Sequence[Level]) -> dict[str, object]:
    """Tokens a second, and both waits, by requests at once."""
    picture = lines(
        [each.at_once for each in found],
        {
            "output tok/s": [float(np.median(each.rates)) for each in found],
            "TTFT, ms (right)": [1e3 * each.ttft_s for each in found],
            "TPOT, ms (right)": [1e3 * each.tpot_s for each in found],
        },
        "requests at once",
        "tok/s",
    )
    for row in picture["data"][1:]:  # type: ignore[index]
        row["yaxis"] = "y2"
    picture["layout"] |= {  # type: ignore[operator]
        "yaxis2": {"title": {"text": "ms"}, "overlaying": "y", "side": "right",
                   "rangemode": "tozero", "showgrid": False}
    }  # fmt: skip
    picture["layout"]["xaxis"]["type"] = "log"  # type: ignore[index]
    return picture


def hundred(subject: Subject) -> Finding:
    """The slope of TTFT over unseen prompts of two lengths, and TPOT of one request alone."""
    asking = subject.server()
    short = 64
    long = min(1600, asking.room(32))
    ttft: dict[int, list[float]] = {short: [], long: []}
    tokens: dict[int, list[int]] = {short: [], long: []}
    tpot = []
    for number in range(subject.repeats):
        for length in (short, long):
            body = Body(prompt=asking.text(length, 3000 + 2 * number + (length > 64)), tokens=32)
            [asked] = asking.all([body])
            ttft[length].append(asked.ttft_s)
            tokens[length].append(asked.prompt)
            if length == short and asked.tpot_s is not None:
                tpot.append(asked.tpot_s)
    apart = float(np.median(tokens[long]) - np.median(tokens[short]))

    def slope(parts: Sequence[np.ndarray]) -> float:
        return float(np.median(parts[1]) - np.median(parts[0])) / apart

    inputs = bootstrap("µs an input token", " µs", [[1e6 * s for s in ttft[short]],
                       [1e6 * s for s in ttft[long]]], slope)  # fmt: skip
    ratio = bootstrap(
        "input tokens that one output token is worth", "",
        [ttft[short], ttft[long], tpot],
        lambda p: float(np.median(p[2])) / max(slope(p[:2]), 1e-9),
    )  # fmt: skip
    return Finding(
        figures=[ratio, inputs, median_of("an output token", [1e3 * s for s in tpot], " ms")],
        promise=Promise(low=70.0, high=140.0, none=10.0),
        why="It is the batch at which a step turns from reading weights to computing: about a "
        "hundred on a GPU with a large model; on a CPU, which computes little for what it reads, "
        "it is smaller, and a small model pays its step's fixed time instead.",
    )


def dearer(subject: Subject) -> Finding:
    """Tokens a second of prompts alone, and of answers alone, with many requests at once."""
    asking = subject.server()
    rounds = max(2, subject.repeats // 3)
    long = min(384, asking.room(1))
    inputs, outputs = [], []
    for number in range(rounds):
        fresh = [Body(prompt=asking.text(long, 5000 + 64 * number + i), tokens=1)
                 for i in range(48)]  # fmt: skip
        inputs.append(per_s(asking.all(fresh, 16), lambda a: a.prompt))
        long_answers = [Body(prompt=asking.text(8, 7000 + 64 * number + i), tokens=96)
                        for i in range(64)]  # fmt: skip
        outputs.append(per_s(asking.all(long_answers, 64), lambda a: a.output))
    return Finding(
        figures=[
            bootstrap("an output token costs", " input tokens", [inputs, outputs],
                      lambda p: float(np.median(p[0]) / np.median(p[1]))),
            median_of("prompts alone", inputs, " tok/s"),
            median_of("answers alone, 64 at once", outputs, " tok/s"),
        ],
        promise=Promise(low=2.0, high=4.0),
        why="Prices of two to four for one are those of a server whose batches are full: there an "
        "output token is a row of a step as an input token is, and reads its context besides.",
    )  # fmt: skip


def per_s(asked: Sequence[Asked], count: Callable[[Asked], int]) -> float:
    """Tokens a second of requests that were sent together."""
    took_s = max(a.sent_s + a.e2e_s for a in asked) - min(a.sent_s for a in asked)
    return sum(map(count, asked)) / took_s


def busy(subject: Subject) -> Finding:
    """The same server at half of what it can do and beyond it: busy share, and goodput."""
    asking = subject.server()
    most = max(each.requests_s for each in subject.once(levels))
    at = {}
    for number, share in enumerate((HALF, OVER)):
        subject.watch(f"{share:g} times what it can do")
        bodies = poisson(asking, share * most, BUSY_S, seed=20 + number)
        at[share] = [a for a in asking.at_times(bodies) if a is not None], len(bodies)
    kept, _ = at[HALF]
    ttft_s = 1.5 * float(np.percentile([a.ttft_s for a in kept], 95))
    tpot_s = 1.5 * float(np.percentile([a.tpot_s for a in kept if a.tpot_s is not None], 95))
    good = {
        share: 100 * sum(a.ttft_s <= ttft_s and (a.tpot_s or 0) <= tpot_s for a in asked) / count
        for share, (asked, count) in at.items()
    }
    occupied = {share: 100 * covered(asked) for share, (asked, _) in at.items()}
    return Finding(
        figures=[
            Figure(name="miss their objectives beyond capacity", value=100 - good[OVER], unit="%"),
            Figure(name="miss at half of it", value=100 - good[HALF], unit="%"),
            Figure(name="busy beyond capacity", value=occupied[OVER], unit="%"),
            Figure(name="busy at half of it", value=occupied[HALF], unit="%"),
            Figure(name="objective, first token", value=1e3 * ttft_s, unit=" ms"),
            Figure(name="objective, each token", value=1e3 * tpot_s, unit=" ms"),
        ],
        promise=Promise(low=50.0, none=5.0),
        why="Busy is the share of time in which anything ran, as a GPU's utilization is told; it "
        f"is {occupied[HALF]:.0f}% where nearly all are served in time and {occupied[OVER]:.0f}% "
        "where they are not. Goodput tells the two apart.",
        picture={
            "data": [
                {"type": "bar", "name": name, "x": ["half of capacity", "beyond capacity"],
                 "y": [round(of[HALF], 2), round(of[OVER], 2)]}
                for name, of in (("busy", occupied), ("in their objectives", good))
            ],
            "layout": {"barmode": "group", "yaxis": {"title": {"text": "%"}, "range": [0, 102]},
                       "xaxis": {}},
        },
    )  # fmt: skip


def poisson(asking: Asking, per_s: float, seconds: float, seed: int) -> list[Body]:
    """Unseen requests at random times."""
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1 / per_s, max(8, int(per_s * seconds))))
    return [
        Body(prompt=asking.text(PROMPT, 10**5 * seed + i), tokens=ANSWER, at_s=float(at_s))
        for i, at_s in enumerate(times)
    ]


def covered(asked: Sequence[Asked]) -> float:
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
