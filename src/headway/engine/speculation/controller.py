"""How many guesses of each sequence a step verifies: as many as bring the most tokens a second.

Given for each decode the chances that its guesses are reached and kept, and what the step costs:

    expected tokens   one for each decode, and for each guess its chance
    seconds           of the decodes alone, and what the guesses add to the step as it is

    1 decode, 13.3 ms; guesses with chances 0.8 0.64 0.51 …; 5 rows 16.6 ms, 9 rows 20 ms
    none: 1 / 13.3 = 75 tokens/s     4: 3.36 / 16.6 = 202     8: 4.33 / 20 = 216

What runs beside the decodes, prompts say, is not counted as their time: a token that comes now
saves a share of a later step, and that is a step of decodes. Where prompts share most steps, which
then compute as fast as they can, it saves no more than its own row there, which is what a guess
takes: nothing is guessed.

    4 decodes, 9.3 ms; a guess takes 0.4 ms, a row beside 64 tokens of a prompt 0.7 ms
    nobody comes: a token is worth 2.3 ms    prompts in 9 of 10 steps: 0.9 ms

Guesses are taken in the order of what they are worth, chance less the price of their context, and
every number of them is looked at, for the cost curve need not be concave: a row may be dear and the
three behind it nearly free. The price of context counts in tokens at the best rate, which is known
only in the end; so the rate found gives the next order until none is better (Dinkelbach 1967).
That finds the best choice of all. With `most_s` it is the best along that order.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from headway.engine.cost import StepCost, Work

CHUNK = 64
"""Tokens of a prompt beside which a row takes what it computes, for the weights are read anyway."""
NOT_BETTER = 1e-9
"""Rates that differ by less than this share are equal, and fewer guesses win."""


class Drafting(NamedTuple):
    """What a drafter takes: seconds for being asked, for each pass, and for each row of a pass.

    One pass of a model drafts one token of each sequence that has more to draft: 3 and 1 tokens of
    two sequences are three passes and four rows. Where all are drafted `at_once`, it is one pass.
    """

    pass_s: float = 0.0
    row_s: float = 0.0
    at_once: bool = False
    ask_s: float = 0.0

    def seconds(self, depth: int) -> float:
        """Of drafting up to `depth` tokens of each sequence, but for its rows.

        >>> Drafting(pass_s=2.0, ask_s=1.0).seconds(3), Drafting(2.0, 0.0, True).seconds(3)
        (7.0, 2.0)
        """
        return self.ask_s + self.pass_s * (min(depth, 1) if self.at_once else depth)


FREE = Drafting()


class PlainStep(NamedTuple):
    """A step as it is without guesses, and what room it has for them.

    `starts[i]` is the position of the first guess of decode i. `decodes` is what the decodes do
    alone, `work` what the step does. At most `budget` guesses fit in all, and with them the step
    should last no longer than `most_s`. Of the steps to come a share `busy` computes prompts, too.
    """

    starts: Sequence[int]
    decodes: Work
    work: Work
    budget: int
    most_s: float = inf
    busy: float = 0.0

    def worth_s(self, cost: StepCost) -> float:
        """Seconds that a token of each decode saves where it comes now: those of a later step."""
        alone_s, count = cost.seconds(self.decodes), len(self.starts)
        if not self.busy:
            return alone_s
        fewer = Work(*[part * (count - 1) // count for part in self.decodes])
        with_s, without_s = (
            cost.seconds(work._replace(num_tokens=work.num_tokens + CHUNK))
            for work in (self.decodes, fewer)
        )
        return alone_s + self.busy * min(count * (with_s - without_s) - alone_s, 0.0)


def choose(
    values: Sequence[Sequence[float]],
    plain: PlainStep,
    cost: StepCost,
    drafting: Drafting = FREE,
) -> list[int]:
    """How many guesses of each sequence to verify, or with `drafting` to draft and then verify.

    `values[i]` are the chances that the guesses of decode i are reached and kept: they never rise
    along it. Empty: it has none.

    >>> decodes = Work(2, 2, 200, 200)
    >>> choose([[0.9, 0.8], []], PlainStep([100, 100], decodes, decodes, 8), StepCost())
    [2, 0]
    >>> choose([[0.9, 0.8], []], PlainStep([100, 100], decodes, decodes, 1), StepCost())
    [1, 0]
    """
    counts = [0] * len(values)
    best = max([chances[0] for chances in values if chances], default=0.0)
    most = min(plain.budget, sum([len(chances) for chances in values]))
    if best <= 0 or most < 1:
        return counts
    step = Step(plain, cost, most, drafting)
    if best <= step.least_value:
        return counts
    for taken in step.best_of(values):
        counts[taken] += 1
    return counts


def least_value(plain: PlainStep, cost: StepCost, most: int) -> float:
    """What none of up to `most` guesses may be worth less than, to pay.

    >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
    >>> plain = [PlainStep([100] * work.num_tokens, work, work, 8) for work in (one, many)]
    >>> [round(least_value(each, StepCost(), 8), 2) for each in plain]
    [0.0, 0.91]
    """
    most = min(plain.budget, most)
    return Step(plain, cost, most, FREE).least_value if most > 0 else inf


def row_price(plain: PlainStep, cost: StepCost) -> float:
    """The part of a token that pays for a row, where each decode has one guess more.

    >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
    >>> plain = [PlainStep([100] * work.num_tokens, work, work, 64) for work in (one, many)]
    >>> [round(row_price(each, StepCost()), 2) for each in plain]
    [0.0, 0.9]
    """
    count = len(plain.starts)
    return cost.rows_s(plain.work, count)[count] / cost.seconds(plain.decodes)


class Step:
    """A step, and what up to `most` guesses add to its seconds."""

    def __init__(self, plain: PlainStep, cost: StepCost, most: int, drafting: Drafting) -> None:
        self.starts, self.num_decodes, self.drafting = plain.starts, len(plain.starts), drafting
        self.alone_s, beside_s = plain.worth_s(cost), cost.seconds(plain.work)
        self.room_s = plain.most_s - beside_s
        self.context_s = cost.attended_s
        row_s = drafting.row_s
        rows_s = cost.rows_s(plain.work, most)
        self.added_s = [s + count * row_s for count, s in enumerate(rows_s)] if row_s else rows_s
        """Seconds that 0, 1, 2 … guesses add, but for their contexts and the drafter's passes."""

    @property
    def least_value(self) -> float:
        """What one with the shortest context has to be worth at least, so that it could pay."""
        least_s = min([s / count for count, s in enumerate(self.added_s[1:], 1)])
        least_s += self.context_s * (min(self.starts) + 1)
        least_s += self.drafting.seconds(1) / self.num_decodes
        return self.num_decodes * least_s / self.alone_s

    def best_of(self, values: Sequence[Sequence[float]]) -> list[int]:
        """The sequence of each guess that is taken; of as good choices the one with fewest."""
        added_s, taken = self.added_s, []
        rate = self.num_decodes / self.alone_s
        least_s = min([s - before for before, s in pairwise(added_s)])
        longest = max([len(chances) for chances in values])
        one_by_one = self.drafting.pass_s and not self.drafting.at_once
        for depth in range(1, longest + 1) if one_by_one else (longest,):
            while True:
                price = rate * self.context_s
                guesses = [
                    (price * place - chance, index, chance, place)
                    for index, (chances, start) in enumerate(zip(values, self.starts))
                    for place, chance in enumerate(chances[:depth], start + 1)
                    if chance > rate * least_s
                ]
                guesses.sort()
                count, better = self._scan(guesses, depth, rate)
                if not count:
                    break
                rate, taken = better, [index for _, index, _, _ in guesses[:count]]
        return taken

    def _scan(
        self,
        guesses: list[tuple[float, int, float, int]],
        depth: int,
        rate: float,
    ) -> tuple[int, float]:
        """(how many of the guesses in this order give the best rate, that rate); 0: none beats
        `rate`. They are drafted as `depth` tokens of each sequence are."""
        drafting_s = self.drafting.seconds(depth)
        tokens, context, count = float(self.num_decodes), 0, 0
        rate *= 1 + NOT_BETTER
        for number, ((_, _, chance, place), more_s) in enumerate(zip(guesses, self.added_s[1:]), 1):
            tokens += chance
            context += place
            more_s += context * self.context_s + drafting_s
            if more_s > self.room_s:
                break
            if tokens > rate * (self.alone_s + more_s):
                rate, count = tokens / (self.alone_s + more_s), number
        return count, rate
