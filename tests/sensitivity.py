"""Does a loss show: one model and its rounded copies, judged on text and skills item by item.

Given folders it measures bits per byte, divergence from the first and skills on the same items, and
what a difference between two of them is worth: its interval and the probability of chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from headway.evals.divergence import Divergence, compare
from headway.evals.questions import ask
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.evals.statistics import interval, mcnemar, paired_bootstrap
from headway.evals.text import TextScore, score_text, windows
from headway.whole_model import FolderModel

MEMORY = "96MiB"
OTHERS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every folder is judged on: windows of a text, questions of each skill and level."""

    text: str
    windows: int
    questions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One folder judged; `right` has an entry for each question."""

    name: str
    divergence: Divergence
    text: TextScore
    right: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """B − A with its 95% interval; `p` is the chance of one so far in this direction."""

    mean: float
    low: float
    high: float
    p: float


def chance(questions: int) -> float:
    """The share of right answers of somebody who says the same to each skill and level.

    What is said is the answer that would be right most often for OTHERS other questions: "positive"
    to praise and blame, half of the time right; a sum to sums, hardly ever.
    """
    asked = right = 0
    for skill in SKILLS:
        for level in LEVELS:
            others = list(islice(examples(skill, level, TEST_SEED + 1), OTHERS))
            reply = max((one.answer for one in others), key=lambda said: accepted(others, said))
            cell = list(islice(examples(skill, level, TEST_SEED), questions))
            right += accepted(cell, reply)
            asked += len(cell)
    return right / asked


def accepted(asked: Sequence[Example], reply: str) -> int:
    """How many of these a reply answers."""
    return sum(each.accepts(reply) for each in asked)


def judge(
    name: str, folder: Path, reference: FolderModel, task: Task, **options: object
) -> Quality:
    """Everything that is asked of one folder; keyword arguments are the engine's options."""
    model = FolderModel(folder, name=name, kv_memory=MEMORY, **options)
    right = []
    if task.questions:
        report = ask(model, questions=task.questions, seed=TEST_SEED)
        right = [item.right for item in report.items]
    return Quality(
        name=name,
        divergence=compare(reference, model, windows(task.text, limit=task.windows)),
        text=score_text(model, task.text, limit=task.windows),
        right=right,
    )


def difference(values: Sequence[float], weights: Sequence[float] | None = None) -> Difference:
    """The (weighted) mean of B − A over items, by the paired bootstrap."""
    array = np.array(values, dtype=float)
    scale = None if weights is None else np.array(weights, dtype=float)
    draws = paired_bootstrap(array, scale)
    low, high = interval(draws)
    mean = float(array.sum() / (len(array) if scale is None else scale.sum()))
    against = int((draws <= 0).sum() if mean > 0 else (draws >= 0).sum())
    return Difference(mean=mean, low=low, high=high, p=(1 + against) / (1 + len(draws)))


def more_divergence(a: Quality, b: Quality) -> Difference:
    """How much further B is from the reference than A, in nats a token."""
    pairs = list(zip(a.divergence.passages, b.divergence.passages, strict=True))
    return difference([y.kl - x.kl for x, y in pairs], [x.num_tokens for x, _ in pairs])


def more_bits(a: Quality, b: Quality) -> Difference:
    """How many more bits a byte takes in B."""
    pairs = list(zip(a.text.passages, b.text.passages, strict=True))
    bits = [(y.nats - x.nats) / np.log(2) for x, y in pairs]
    return difference(bits, [x.num_bytes for x, _ in pairs])


def fewer_right(a: Quality, b: Quality) -> Difference:
    """The accuracy of B less that of A; p is exact McNemar's, two-sided."""
    pairs = list(zip(a.right, b.right, strict=True))
    found = difference([float(y) - float(x) for x, y in pairs])
    lost = sum(x and not y for x, y in pairs)
    gained = sum(y and not x for x, y in pairs)
    return Difference(mean=found.mean, low=found.low, high=found.high, p=mcnemar(lost, gained))
