"""Claims about batching rules: static and continuous where lengths vary, and where they do not."""

import math
import random
from collections.abc import Callable

import numpy as np

from literature.claim import Claim, Figure, Finding, Promise, bootstrap
from literature.engines import EngineFactory, Lengths, Played
from literature.pictures import bars
from literature.subject import Subject

SHORTEST, LONGEST, ALIKE = 8, 128, 48
ROWS, BATCHES = 16, 3
Pairs = dict[str, list[tuple[Played, Played]]]
"""By load what static and what continuous batching came to, a pair a repeat."""


def lengths(draw: random.Random, varied: bool) -> Lengths:
    """Three batches of requests: 8 to 128 tokens, each octave as likely as the next, or all 48."""

    def one() -> int:
        if not varied:
            return ALIKE
        return round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))

    return [(one(), one()) for _ in range(ROWS * BATCHES)]


def rules(subject: Subject) -> Pairs:
    """Both rules on the same queues, in turns."""
    folder, _ = subject.model()
    subject.watch("static and continuous batching take turns")
    factory = EngineFactory.of(folder, **{**subject.options, "max_num_seqs": ROWS})
    found: Pairs = {"varied": [], "alike": []}
    factory.play(factory.engine(), lengths(random.Random(99), True)[:ROWS], seed=99)
    for number in range(max(3, subject.repeats)):
        for name, pair in found.items():
            load = lengths(random.Random(number), name == "varied")
            played = {}
            for rule in ("static", "continuous") if number % 2 else ("continuous", "static"):
                engine = factory.engine(rule)
                played[rule] = factory.play(engine, load, seed=number)
            pair.append((played["static"], played["continuous"]))
    return found


def times(subject: Subject, load: str, name: str, of: Callable[[Played], float]) -> Figure:
    """Static's figure over continuous', paired by draw."""
    ratios = [of(static) / of(other) for static, other in subject.once(rules)[load]]
    return bootstrap(name, "x", [ratios], lambda p: float(np.median(p[0])))


def varied(subject: Subject) -> Finding:
    """A full queue of varied lengths."""
    pairs = subject.once(rules)["varied"]
    return Finding(
        figures=[
            times(subject, "varied", "tokens a second, continuous over static", per_token),
            times(subject, "varied", "steps, static over continuous", lambda p: p.steps),
            times(subject, "varied", "a request's end, static over continuous", middle_end),
            times(subject, "alike", "tokens a second, all of one length", per_token),
        ],
        promise=Promise(low=1.5),
        why="A static batch steps on until its longest answer ends, with ever fewer rows. The gain "
        "is that of steps where a step takes as long for any rows, as on a GPU; on a CPU a step "
        "with few rows takes less, and what is left is that nobody waits for a stranger's answer.",
        picture=bars(mean_rates(pairs), "answer tok/s of computing"),
    )


def mean_rates(pairs: list[tuple[Played, Played]]) -> list[tuple[str, float]]:
    """Tokens a second by rule."""
    rules = enumerate(("static", "continuous"))
    return [(rule, float(np.mean([pair[at].rate for pair in pairs]))) for at, rule in rules]


def per_token(played: Played) -> float:
    """Seconds of a token."""
    return 1 / played.rate


def middle_end(played: Played) -> float:
    """When half of the requests had their last token."""
    return float(np.median(played.ends_s))


def bus(subject: Subject) -> Finding:
    """A full queue of one length."""
    pairs = subject.once(rules)["alike"]
    ratios = [static.rate / other.rate for static, other in pairs]
    name = "tokens a second, static over continuous"
    return Finding(
        figures=[bootstrap(name, "x", [ratios], lambda p: float(np.median(p[0])))],
        promise=Promise(low=1.0, high=1.1, none=0.9),
        why="A bus whose passengers all ride to the last stop loses nothing by waiting for all: "
        "where lengths are known to be alike, and nobody waits, the rule hardly matters.",
    )


CLAIMS = (
    Claim(
        key="batching-varied",
        family="Batching",
        says="Where lengths vary, continuous batching serves far more than static batching.",
        source="Yu et al., Orca (2022)",
        measure=varied,
        needs="folder",
        how="A full queue of 48 requests in batches of 16, other lengths in each repeat, CPU time.",
    ),
    Claim(
        key="batching-bus",
        family="Batching",
        says="A static batch is a bus: of one length it is as good as any rule.",
        source="C. Huyen, AI Engineering (2025), chapter 9",
        measure=bus,
        needs="folder",
        how="The same with prompts and answers of 48 tokens each.",
    ),
)
