"""How many guesses of each sequence a step verifies: as many as bring the most tokens a second.

Given for each decode the chances that its guesses are reached and kept, and what the step costs:

    expected tokens   one for each decode, and for each guess its chance
    seconds           of the decodes alone, and what the guesses add to the step as it is

    1 decode, 13.3 ms; guesses with chances 0.8 0.64 0.51 …; 5 rows 16.6 ms, 9 rows 20 ms
    none: 1 / 13.3 = 75 tokens/s     4: 3.36 / 16.6 = 202     8: 4.33 / 20 = 216

What runs beside the decodes, prompts say, is not counted as their time: a token that comes now
saves a share of a later step, and that is a step of decodes. Where most steps have prompts, too, it
saves what such a step takes beyond its prompts; where more prompts wait than fit, there will be as
many steps whatever comes now, and it saves no more than its own row, which is what a guess takes:
nothing is guessed.

    4 decodes, 9.3 ms; beside 64 tokens of a prompt 53 ms, beside 128 98 ms: 0.7 ms a token
    nobody comes: a token is worth 2.3 ms    prompts in each step: 8.2 / 4 = 2.1 ms
    prompts wait: 0.7 ms

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

import numpy as np
from numpy.typing import NDArray

from headway.engine.cost import StepCost, Work
from headway.engine.knots import bends
from headway.engine.speculation.found import Expected

CHUNK = 64
"""Tokens of a prompt beside which a row takes what it computes, for the weights are read anyway."""
NOT_BETTER = 1e-9
"""Rates that differ by less than this share are equal, and fewer guesses win."""
RIGHT = 0.98
"""No source is right more often: behind matches of 32 tokens and more 97% were, in real chats."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
NO_ORDER = np.zeros(0, np.int64)


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
    should last no longer than `most_s`. Of the steps to come a share `busy` computes prompts, too;
    or all do, as many as fit, for `prompts_wait`.
    `found` are guesses beside those of which is chosen: what they bring, and take, is no question.
    `known_worth_s`: what `worth_s` says, where somebody has asked.
    """

    starts: Sequence[int]
    decodes: Work
    work: Work
    budget: int
    most_s: float = inf
    busy: float = 0.0
    prompts_wait: bool = False
    found: Expected = Expected()
    known_worth_s: float | None = None

    def worth_s(self, cost: StepCost) -> float:
        """Seconds that a token of each decode saves where it comes now: those of a later step."""
        if self.known_worth_s is not None:
            return self.known_worth_s
        alone_s, count = cost.seconds(self.decodes), len(self.starts)
        if not (self.busy or self.prompts_wait):
            return alone_s
        fewer = Work(*[part * (count - 1) // count for part in self.decodes])
        without_s, full_s, fuller_s = (
            cost.seconds(work._replace(num_tokens=work.num_tokens + more))
            for work, more in ((fewer, CHUNK), (self.decodes, CHUNK), (self.decodes, 2 * CHUNK))
        )
        rows_s = min(count * (full_s - without_s), alone_s)
        if self.prompts_wait:
            return rows_s
        beside_s = max(2 * full_s - fuller_s, rows_s)
        return alone_s + self.busy * min(beside_s - alone_s, 0.0)


def choose(
    values: Sequence[Sequence[float]],
    plain: PlainStep,
    cost: StepCost,
    drafting: Drafting = FREE,
    shares: Sequence[float] | None = None,
    least_gain: float = NOT_BETTER,
) -> list[int]:
    """How many guesses of each sequence to verify, or with `drafting` to draft and then verify.

    `values[i]` are the chances that the guesses of decode i are reached and kept: they never rise
    along it. Empty: it has none. What is drafted of decode i is verified in `shares[i]` of cases,
    and takes rows in those; None: always. Guesses that are drafted raise the rate by `least_gain`
    at least, or there are none.

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
    step = Step(plain, cost, most, drafting, shares)
    if best <= step.least_value:
        return counts
    for taken in step.best_of(values, least_gain):
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
    more = with_rows(plain.work, len(plain.starts), cost)
    return (cost.seconds(more) - cost.seconds(plain.work)) / cost.seconds(plain.decodes)


def with_rows(work: Work, count: int, cost: StepCost) -> Work:
    """`work` and so many guesses more, but for their contexts."""
    tokens, sampled, attended, read = work
    return Work(tokens + count, sampled + count, attended, read + count * len(cost.windows))


class Reach:
    """What guesses may bring at best, known before anybody is asked for one: up to `depth` of each
    decode.

    Between the knots of the cost curve each row adds the same; so what 1, 2, 3 … rows add is known
    from what these `rows` add. Where each decode has a guess more is looked at as well: between all
    of these the rate is monotone.
    """

    def __init__(self, plain: PlainStep, cost: StepCost, depth: int) -> None:
        self.num_decodes, work = len(plain.starts), plain.work
        count = self.num_decodes
        most = min(plain.budget, depth * count)
        self.rows = list[int]()
        if most > 0:
            self.rows = sorted({*bends(work.num_tokens, most), *range(count, most, count)})
        self.alone_s, step_s = plain.worth_s(cost), cost.seconds(work)
        self.added_s = [cost.seconds(with_rows(work, rows, cost)) - step_s for rows in self.rows]

    @property
    def least_taken(self) -> float:
        """`choose` takes no guess that is worth no more: the cheapest row takes so much.

        >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
        >>> plain = [PlainStep([100] * work.num_tokens, work, work, 99) for work in (one, many)]
        >>> [round(Reach(each, StepCost(), 8).least_taken, 2) for each in plain]
        [0.0, 0.9]
        """
        rows, added_s, least_s = 0, 0.0, inf
        for more, more_s in zip(self.rows, self.added_s):
            least_s = min(least_s, (more_s - added_s) / (more - rows))
            rows, added_s = more, more_s
        return self.num_decodes * least_s / self.alone_s

    def most_gained(self, refills: float = 0.0) -> float:
        """The share by which they raise the rate at most: each is `RIGHT` in so many cases, and
        else worth `refills`.

        >>> one, many = Work(1, 1, 100, 100), Work(64, 64, 6400, 6400)
        >>> plain = [PlainStep([100] * work.num_tokens, work, work, 512) for work in (one, many)]
        >>> [round(Reach(each, StepCost(), 8).most_gained(), 2) for each in plain]
        [7.24, 0.05]
        """
        best, count = 1 / self.alone_s, self.num_decodes
        for rows, added_s in zip(self.rows, self.added_s):
            whole, rest = divmod(rows, count)
            right = RIGHT * (1 - RIGHT**whole) / (1 - RIGHT) + rest / count * RIGHT ** (whole + 1)
            right += (rows / count - right) * refills
            best = max(best, (1 + right) / (self.alone_s + added_s))
        return best * self.alone_s - 1


class Step:
    """A step, and what up to `most` guesses add to its seconds."""

    def __init__(
        self,
        plain: PlainStep,
        cost: StepCost,
        most: int,
        drafting: Drafting,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.starts, self.num_decodes = plain.starts, len(plain.starts)
        self.drafting, self.shares = drafting, shares
        self.tokens, rows = self.num_decodes + plain.found.tokens, round(plain.found.rows)
        rows_s = cost.rows_s(plain.work, rows + most)
        found_s = rows_s[rows]
        self.alone_s = plain.worth_s(cost) + found_s
        self.room_s = plain.most_s - cost.seconds(plain.work) - found_s
        self.added_s = [s - found_s for s in rows_s[rows:]] if rows else rows_s
        self.row_s, self.context_s = drafting.row_s, cost.attended_s
        if shares is None:
            self.added_s = [s + count * self.row_s for count, s in enumerate(self.added_s)]
        """Seconds that 0, 1, 2 … rows add, but for their contexts and the drafter's passes."""

    @property
    def least_value(self) -> float:
        """What one with the shortest context has to be worth at least, so that it could pay."""
        least_s = min([s / count for count, s in enumerate(self.added_s[1:], 1)])
        least_s += self.context_s * (min(self.starts) + 1)
        least_s += self.drafting.seconds(1) / self.num_decodes
        return self.tokens * least_s / self.alone_s

    def best_of(self, values: Sequence[Sequence[float]], least_gain: float) -> list[int]:
        """The sequence of each guess that is taken; of as good choices the one with fewest."""
        is_found = self.shares is None and self.drafting == FREE
        return self._best_found(values) if is_found else self._best_drafted(values, least_gain)

    def _best_found(self, values: Sequence[Sequence[float]]) -> list[int]:
        """The same where nothing is drafted: one list of guesses, too short for arrays."""
        added_s, taken = self.added_s, list[int]()
        rate = self.tokens / self.alone_s
        least_s = min([s - before for before, s in pairwise(added_s)])
        while True:
            price, least = rate * self.context_s, rate * least_s
            guesses = [
                (price * place - chance, index, chance, place)
                for index, (chances, start) in enumerate(zip(values, self.starts))
                for place, chance in enumerate(chances, start + 1)
                if chance > least
            ]
            guesses.sort()
            tokens, context, count, rate = self.tokens, 0, 0, rate * (1 + NOT_BETTER)
            for number, ((_, _, chance, place), s) in enumerate(zip(guesses, added_s[1:]), 1):
                tokens += chance
                context += place
                more_s = s + context * self.context_s
                if more_s > self.room_s:
                    break
                if tokens > rate * (self.alone_s + more_s):
                    rate, count = tokens / (self.alone_s + more_s), number
            if not count:
                return taken
            taken = [index for _, index, _, _ in guesses[:count]]

    def _best_drafted(self, values: Sequence[Sequence[float]], least_gain: float) -> list[int]:
        """The same for every depth to which may be drafted, and with the shares that ride."""
        guesses = Guesses.of(values, self.starts, self.shares)
        longest = len(guesses.depths) // len(values)
        one_by_one = self.drafting.pass_s and not self.drafting.at_once
        depths = range(1, longest + 1) if one_by_one else (longest,)
        drafting_s = np.array([[self.drafting.seconds(depth)] for depth in depths])
        within = guesses.depths <= np.array([[depth] for depth in depths])
        least_s = min([s - before for before, s in pairwise(self.added_s)])
        taken, rate = list[int](), self.tokens / self.alone_s
        order, before = guesses.order(rate * self.context_s, rate * least_s), NO_ORDER
        while not np.array_equal(order, before[: len(order)]):
            riding = within[:, order]
            rates = self._rates(guesses, order, riding, drafting_s)
            better = float(rates.max(initial=0.0))
            if better <= rate * (1 + (NOT_BETTER if taken else least_gain)):
                break
            fewest = int((rates >= better * (1 - NOT_BETTER)).argmax())
            depth, last = divmod(fewest, len(order))
            first = order[: last + 1][riding[depth, : last + 1]]
            rate, taken = better, (first // longest).tolist()
            order, before = guesses.order(rate * self.context_s, rate * least_s), order
        return taken

    def _rates(
        self, guesses: "Guesses", order: Integers, riding: Booleans, drafting_s: Floats
    ) -> Floats:
        """Tokens a second with the first 1, 2 … N guesses in this order of those that are `riding`,
        (depths, N), which are drafted in `drafting_s`; 0: they do not fit."""
        numbers, shares = riding.cumsum(axis=1), guesses.shares
        rows = numbers if shares is None else (riding * shares[order]).cumsum(axis=1)
        places, chances = (guesses.starts + guesses.depths)[order], guesses.chances[order]
        if shares is not None:
            places, chances = shares[order] * places, shares[order] * chances
        more_s = np.interp(rows, np.arange(len(self.added_s)), self.added_s)
        more_s += drafting_s + self.context_s * (riding * places).cumsum(axis=1)
        if shares is not None:
            more_s += self.row_s * numbers
        tokens = self.tokens + (riding * chances).cumsum(axis=1)
        rates: Floats = tokens / (self.alone_s + more_s)
        rates[(numbers >= len(self.added_s)) | (more_s > self.room_s)] = 0.0
        return rates


class Guesses(NamedTuple):
    """All guesses of S sequences, up to L of each, one sequence after the other, (S · L): their
    chances, 0 where there is none, depths, where the sequence stands, and in what share of cases
    they are verified, None: always."""

    chances: Floats
    depths: Integers
    starts: Floats
    shares: Floats | None

    @classmethod
    def of(
        cls,
        values: Sequence[Sequence[float]],
        starts: Sequence[int],
        shares: Sequence[float] | None,
    ) -> "Guesses":
        """Those with these chances."""
        longest = max([len(chances) for chances in values])
        padding = [0.0] * longest
        chances = np.array([[*each, *padding[len(each) :]] for each in values]).ravel()
        depths = np.tile(np.arange(1, longest + 1), len(values))
        by_guess = None if shares is None else np.repeat(shares, longest)
        return cls(chances, depths, np.repeat(np.array(starts, float), longest), by_guess)

    def order(self, place_worth: float, least: float) -> Integers:
        """Those worth more than `least`, the best first; a token of context takes `place_worth`."""
        found = np.flatnonzero(self.chances > least)
        chances, places = self.chances[found], self.starts[found] + self.depths[found]
        return found[np.argsort(place_worth * places - chances, kind="stable")]
