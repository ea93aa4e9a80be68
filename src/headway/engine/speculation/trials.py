"""Steps that are run for what they tell of the price of guesses.

The cost of a step is learned from steps that are run, and what is not run is not known: rows that
seemed dear, because others used the machine or nobody ever saw so many, would seem so for ever. And
where all steps have guesses, nobody sees how soon the step without them would be over: after some
hundred steps of 32 sequences with guesses that without seemed to take 40 ms, and took 33.
"""

from headway.engine.cost import StepCost
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.rests import IN_VAIN

SHARE = IN_VAIN
"""Of the time, what guesses that do not seem to pay may take."""
TRIED = 3
"""Guesses that are tried where none seems to pay."""
DOUBTFUL, PLAIN_ONCE = 1.2, 16
"""Where guesses promise less than this many times the tokens a second, a step in so many has none:
it costs at most a hundredth."""


class Trials:
    """When a step verifies more guesses than seem to pay, or none though they do."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._untried_s = 0.0
        """Seconds of steps since more rows were tried."""
        self._num_guessed = 0
        """Steps since one had no guesses."""

    def plain(self, plain: PlainStep) -> None:
        """A step had no guesses that anybody might verify."""
        self._untried_s += self.cost.seconds(plain.work)
        self._num_guessed = 0

    def is_due(self, plain: PlainStep) -> bool:
        """Whether guesses that do not seem to pay may be tried in this step."""
        work = self.cost.with_drafts(plain.work, min(plain.starts), TRIED)
        step_s = self.cost.seconds(plain.work)
        return self.cost.seconds(work) - step_s <= SHARE * (self._untried_s + step_s)

    def vary(self, values: list[list[float]], counts: list[int], plain: PlainStep) -> bool:
        """Change how many guesses of each sequence are verified, where something may be learned.

        More of one sequence where that takes `SHARE` of the time since the last; or none.
        Whether it did.
        """
        work = self.cost.with_guesses(plain.work, plain.starts, counts)
        step_s = self.cost.seconds(work)
        self._untried_s += step_s
        if not any(counts):
            self._num_guessed = 0
        elif self._is_doubtful(values, counts, plain, step_s):
            counts[:] = [0] * len(counts)
            return True
        index = max(range(len(values)), key=lambda i: sum(values[i][counts[i] :]))
        count = counts[index]
        room = plain.budget - sum(counts)
        more = min(len(values[index]), max(TRIED, 2 * count + 1), count + room)
        tried = self.cost.with_drafts(work, plain.starts[index] + count, more - count)
        tried_s = self.cost.seconds(tried)
        dearer_s = tried_s - step_s
        if more <= count or dearer_s > SHARE * self._untried_s or tried_s > plain.most_s:
            return False
        counts[index], self._untried_s = more, 0.0
        return True

    def _is_doubtful(
        self, values: list[list[float]], counts: list[int], plain: PlainStep, step_s: float
    ) -> bool:
        """Whether the guesses gain little and there was no step without any for long."""
        self._num_guessed += 1
        if self._num_guessed < PLAIN_ONCE:
            return False
        more = sum([sum(chances[:count]) for chances, count in zip(values, counts, strict=True)])
        alone_s = step_s - self.cost.seconds(plain.work) + self.cost.seconds(plain.decodes)
        rate, none = (len(values) + more) / alone_s, len(values) / self.cost.seconds(plain.decodes)
        if rate > DOUBTFUL * none:
            return False
        self._num_guessed = 0
        return True
