"""Claims about batching rules: static and continuous where lengths vary, and where they do not."""

import math
import random

from headway.claims.arithmetic import bars
from headway.claims.claim import Claim, Figure, Finding, Promise, bootstrap
from headway.claims.engines import Desk, Lengths
from headway.claims.subject import Subject

SHORTEST, LONGEST, ALIKE = 8, 128, 48
ROWS, BATCHES = 16, 3
Ratios = dict[str, list[tuple[float, float]]]


def lengths(draw: random.Random, varied: bool) -> Lengths:
    """Three batches of requests: 8 to 128 tokens, each octave as likely as the next, or all 48."""

    def one() -> int:
        if not varied:
            return ALIKE
        return round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))

    return [(one(), one()) for _ in range(ROWS * BATCHES)]


def rules(subject: Subject) -> Ratios:
    """Tokens a second by load, of static and of continuous batching, in turns."""
    folder, _ = subject.model()
    subject.watch("static and continuous batching take turns")
    desk = Desk.of(folder, max_num_seqs=ROWS)
    found: Ratios = {"varied": [], "alike": []}
    desk.play(desk.engine(), lengths(random.Random(99), True)[:ROWS], seed=99)
    for number in range(max(3, subject.repeats)):
        for name, pair in found.items():
            load = lengths(random.Random(number), name == "varied")
            rates = {}
            for rule in ("static", "continuous") if number % 2 else ("continuous", "static"):
                engine = desk.engine(rule)
                rates[rule] = desk.play(engine, load, seed=number).rate
            pair.append((rates["static"], rates["continuous"]))
    return found


def times(subject: Subject, load: str, name: str) -> Figure:
    """Continuous over static, paired by draw."""
    ratios = [after / before for before, after in subject.once(rules)[load]]
    return bootstrap(name, "x", [ratios], lambda p: float(sorted(p[0])[len(p[0]) // 2]))


def varied(subject: Subject) -> Finding:
    """A full queue of varied lengths."""
    pairs = subject.once(rules)["varied"]
    return Finding(
        figures=[
            times(subject, "varied", "continuous over static, lengths from 8 to 128"),
            times(subject, "alike", "the same, all of one length"),
        ],
        promise=Promise(low=1.5),
        why="A static batch computes until its longest answer ends, with ever fewer rows; the gain "
        "is the longest over the mean length of a batch, less what a step costs more with rows.",
        picture=bars(
            [
                (rule, sum(pair[at] for pair in pairs) / len(pairs))
                for at, rule in enumerate(("static", "continuous"))
            ],
            "answer tokens a second of computing",
        ),
    )


def bus(subject: Subject) -> Finding:
    """A full queue of one length."""
    figure = times(subject, "alike", "static over continuous, all of one length")
    assert figure.low is not None and figure.high is not None
    turned = Figure(
        name=figure.name,
        value=1 / figure.value,
        low=1 / figure.high,
        high=1 / figure.low,
        unit="x",
    )
    return Finding(
        figures=[turned],
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
