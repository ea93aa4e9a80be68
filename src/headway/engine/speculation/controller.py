"""How many guesses of each sequence a step verifies: as many as bring the most tokens a second.

Given for each decode the chances that its guesses are reached and kept, and what the step costs:

    expected tokens   one for each decode, and for each guess its chance
    seconds           of the decodes alone, and what the guesses add to the step as it is

    1 decode, 13.3 ms; guesses with chances 0.8 0.64 0.51 …; 5 rows 16.6 ms, 9 rows 20 ms
    none: 1 / 13.3 = 75 tokens/s     4: 3.36 / 16.6 = 202     8: 4.33 / 20 = 216

What runs beside the decodes, prompts say, is not counted as their time: a token that comes now
saves a share of a later step, and that is a step of decodes.

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

LEAST_GAIN = 0.05
"""Guesses have to promise so much more than none, for prices are known no better. Four streams of
books, 0.5B shape, int4: what seemed to gain a little lost 7.5% where this was 0, 5.9% with it."""
NOT_BETTER = 1e-9
"""Rates that differ by less than this share are equal, and fewer guesses win."""


class Drafting(NamedTuple):
    """What a drafter takes: seconds for each pass, and for each row of a pass.

    One pass of a model drafts one token of each sequence that has more to draft: 3 and 1 tokens of
    two sequences are three passes and four rows. Where all are drafted `at_once`, it is one pass.
    """

    pass_s: float = 0.0
    row_s: float = 0.0
    at_once: bool = False

    def passes(self, depth: int) -> int:
        """How many draft up to `depth` tokens of each sequence."""
        return min(depth, 1) if self.at_once else depth


FREE = Drafting()


class PlainStep(NamedTuple):
    """A step as it is without guesses, and what room it has for them.

    `starts[i]` is the position of the first guess of decode i. `decodes` is what the decodes do
    alone, `work` what the step does. At most `budget` guesses fit in all, and with them the step
    should last no longer than `most_s`.
    """

    starts: Sequence[int]
    decodes: Work
    work: Work
    budget: int
    most_s: float = inf


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


class Step:
    """A step, and what up to `most` guesses add to its seconds."""

    def __init__(self, plain: PlainStep, cost: StepCost, most: int, drafting: Drafting) -> None:
        self.starts, self.num_decodes, self.drafting = plain.starts, len(plain.starts), drafting
        self.alone_s, beside_s = cost.seconds(plain.decodes), cost.seconds(plain.work)
        self.room_s = plain.most_s - beside_s
        self.context_s = cost.attended_s
        tokens, sampled, attended, read = plain.work
        windows = len(cost.windows)
        self.ends = [0, *knots(tokens, most)]
        self.ends_s = [
            cost.seconds(Work(tokens + end, sampled + end, attended, read + end * windows))
            - beside_s
            + end * drafting.row_s
            for end in self.ends
        ]

    @property
    def least_value(self) -> float:
        """What one with the shortest context has to be worth at least, so that it could pay.

        Between knots the price of all grows in proportion, so the least price a guess is at one.
        """
        least_s = min([s / end for end, s in zip(self.ends[1:], self.ends_s[1:])])
        least_s += self.context_s * (min(self.starts) + 1) + self.drafting.pass_s / self.num_decodes
        return self.num_decodes * least_s / self.alone_s

    def best_of(self, values: Sequence[Sequence[float]]) -> list[int]:
        """The sequence of each guess that is taken; of as good choices the one with fewest."""
        added_s, taken = self._prices(), []
        rate = (1 + LEAST_GAIN) * self.num_decodes / self.alone_s
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
                count, better = self._scan(guesses, added_s, depth, rate)
                if not count:
                    break
                rate, taken = better, [index for _, index, _, _ in guesses[:count]]
        return taken

    def _scan(
        self,
        guesses: list[tuple[float, int, float, int]],
        added_s: list[float],
        depth: int,
        rate: float,
    ) -> tuple[int, float]:
        """(how many of the guesses in this order give the best rate, that rate); 0: none beats
        `rate`. They are drafted as `depth` tokens of each sequence are."""
        passes_s = self.drafting.passes(depth) * self.drafting.pass_s
        tokens, context, count = float(self.num_decodes), 0, 0
        rate *= 1 + NOT_BETTER
        for number, ((_, _, chance, place), more_s) in enumerate(zip(guesses, added_s[1:]), 1):
            tokens += chance
            context += place
            more_s += context * self.context_s + passes_s
            if more_s > self.room_s:
                break
            if tokens > rate * (self.alone_s + more_s):
                rate, count = tokens / (self.alone_s + more_s), number
        return count, rate

    def _prices(self) -> list[float]:
        """Seconds that 0, 1, 2 … guesses add, but for their contexts: straight between the ends."""
        prices = [0.0]
        for (low, low_s), (high, high_s) in pairwise(zip(self.ends, self.ends_s)):
            slope = (high_s - low_s) / (high - low)
            prices += [low_s + slope * count for count in range(1, high - low + 1)]
        return prices


def knots(tokens: int, most: int) -> list[int]:
    """Up to how many more tokens than `tokens` the cost curve is straight; the last is `most`.

    >>> knots(3, 8), knots(8, 8)
    ([1, 5, 8], [8])
    """
    ends, power = [], 1 << tokens.bit_length()
    while power - tokens < most:
        ends.append(power - tokens)
        power *= 2
    return [*ends, most]
