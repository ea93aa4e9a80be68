"""How many draft tokens of each sequence a step verifies: those that maximize tokens per second.

Input are the acceptance probabilities of the draft tokens of each decode, and the cost of the step:

    expected tokens   one per decode, and for each draft token its probability
    seconds           of the decodes alone, plus what the draft tokens add to the actual step

    1 decode, 13.3 ms; draft tokens with probabilities 0.8 0.64 0.51 …; 5 rows 16.6 ms, 9 rows 20 ms
    none: 1 / 13.3 = 75 tokens/s     4: 3.36 / 16.6 = 202     8: 4.33 / 20 = 216

The time of other rows, such as prompts, is not counted: a token gained now saves a share of a later
step of decodes.

Draft tokens are taken in the order of their value, probability minus the cost of their context, and
every number of them is compared, because the cost curve need not be concave: one row may be
expensive and the next three nearly free. The cost of context in tokens depends on the best rate,
which is the result; so the rate found gives the next order, until none is better (Dinkelbach 1967).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from headway.perf.model import StepModel, Work

SAME_RATE = 1e-9
"""Rates that differ by less than this share are equal, and fewer draft tokens win."""


class Drafting(NamedTuple):
    """Cost of a drafter: seconds per call, and per pass, which drafts one token of each sequence;
    with `at_once` one pass drafts all."""

    pass_s: float = 0.0
    at_once: bool = False
    ask_s: float = 0.0

    def seconds(self, depth: int) -> float:
        """Return the seconds of drafting up to `depth` tokens of each sequence.

        >>> Drafting(pass_s=2.0, ask_s=1.0).seconds(3), Drafting(2.0, at_once=True).seconds(3)
        (7.0, 2.0)
        """
        if not depth:
            return 0.0
        return self.ask_s + self.pass_s * (1 if self.at_once else depth)


class PlainStep(NamedTuple):
    """The step without draft tokens, and its room for them.

    `starts[i]` is the position of the first draft token of decode i. `decodes` is the work of the
    decodes alone, `work` that of the step. At most `budget` draft tokens fit in all, and with them
    the step should last at most `max_s`. It brings `other_tokens` in addition to the choice, in
    rows that take `other_s`.
    """

    starts: Sequence[int]
    decodes: Work
    work: Work
    budget: int
    max_s: float = inf
    other_tokens: float = 0.0
    other_s: float = 0.0


class DraftChoice(NamedTuple):
    """Number of draft tokens of each decode, and the factor on the rate of tokens."""

    counts: list[int]
    speedup: float = 1.0


def choose(
    values: Sequence[Sequence[float]],
    plain: PlainStep,
    cost: StepModel,
    drafting: Drafting | None = None,
    min_speedup: float = 1.0,
) -> DraftChoice:
    """Return how many draft tokens of each sequence to verify, or with `drafting` to draft first.

    None if they raise the rate by less than the factor `min_speedup`. `values[i]` are the
    probabilities of the draft tokens of decode i, which never rise along it.

    >>> decodes = Work(2, 2, 200, 200)
    >>> choose([[0.9, 0.8], []], PlainStep([100, 100], decodes, decodes, 8), StepModel()).counts
    [2, 0]
    >>> choose([[0.9, 0.8], []], PlainStep([100, 100], decodes, decodes, 1), StepModel()).counts
    [1, 0]
    """
    counts, num_decodes = [0] * len(values), len(plain.starts)
    most = min(plain.budget, sum(map(len, values)))
    if most < 1:
        return DraftChoice(counts)
    step_s, alone_s = cost.seconds(plain.work), cost.seconds(plain.decodes) + plain.other_s
    added_s = cost.rows_s(plain.work, most)
    cheapest_s = min([more - before for before, more in pairwise(added_s)])
    plain_tokens = num_decodes + plain.other_tokens
    plain_rate = plain_tokens / alone_s
    rate, needed, indices = plain_rate, plain_rate * min_speedup, list[int]()
    while True:
        context_price, least = rate * cost.attended_s, rate * cheapest_s
        ordered = sorted(
            [
                (context_price * (start + depth) - value, depth, index, value)
                for index, (each, start) in enumerate(zip(values, plain.starts, strict=True))
                for depth, value in enumerate(each, 1)
                if value > least
            ]
        )
        best, best_rate = 0, needed * (1 + SAME_RATE)
        tokens, context_s, deepest = plain_tokens, 0.0, 0
        for count, (_, depth, index, value) in enumerate(ordered[:most], 1):
            tokens += value
            context_s += cost.attended_s * (plain.starts[index] + depth)
            deepest = max(deepest, depth)
            more_s = added_s[count] + context_s
            if drafting is not None:
                more_s += drafting.seconds(deepest)
            if step_s + more_s > plain.max_s:
                break
            if tokens > best_rate * (alone_s + more_s):
                best, best_rate = count, tokens / (alone_s + more_s)
        if not best:
            break
        rate = needed = best_rate
        indices = [index for _, _, index, _ in ordered[:best]]
    for index in indices:
        counts[index] += 1
    return DraftChoice(counts, rate / plain_rate)


def row_cost(plain: PlainStep, cost: StepModel) -> float:
    """Return the cost of a row in tokens, if each decode has one more draft token.

    >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
    >>> plain = [PlainStep([100] * work.num_tokens, work, work, 64) for work in (one, many)]
    >>> [round(row_cost(each, StepModel()), 2) for each in plain]
    [0.0, 0.9]
    """
    tokens, sampled, attended, read = plain.work
    count = len(plain.starts)
    more = Work(tokens + count, sampled + count, attended, read + count * len(cost.windows))
    return (cost.seconds(more) - cost.seconds(plain.work)) / cost.seconds(plain.decodes)


def least_value(plain: PlainStep, cost: StepModel, most: int) -> float:
    """Return the minimum value of a draft token that pays: the cost of a row in tokens, at the
    number of rows, up to `most`, at which rows are cheapest.

    >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
    >>> plain = [PlainStep([100] * work.num_tokens, work, work, 8) for work in (one, many)]
    >>> [round(least_value(each, StepModel(), 8), 2) for each in plain]
    [0.0, 0.9]
    """
    most = min(plain.budget, most)
    if most < 1:
        return inf
    added_s = cost.rows_s(plain.work, most)
    least_s = min([more_s / count for count, more_s in enumerate(added_s[1:], 1)])
    return len(plain.starts) * least_s / cost.seconds(plain.decodes)
