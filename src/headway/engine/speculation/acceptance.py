"""The probability that the k-th draft token is accepted: by proposer, and by sequence.

A proposer that found a match of m tokens again is as right as its match is long, and each token
that is accepted lengthens the match by one. So one curve by length says all of it; measured with
n-grams on 150 real chats, the acceptance rate of the tokens that were reached:

    behind a match of     1     2     3     4     5     6     7     8
    the first token     0.26  0.45  0.56  0.57  0.7 … 0.75       0.8
    match 1, token 1 …  0.26  0.46  0.60  0.66  0.73  0.71  0.76  0.81     along one proposal

A proposer without a match, a draft model, has a rate for each depth instead. The probability that a
token is accepted is the product of the rates up to it: behind a match of 2 it is 0.45, 0.25, 0.15.
All counts decay. A sequence's own counts say how much more or less is accepted of it than of all:
as odds, shrunk to 1 as long as there are few (`SequenceOdds`).
"""

from typing import NamedTuple

from headway.engine.speculation.drafts import Match, common_prefix
from headway.engine.speculation.proposers.proposal import Proposal
from headway.perf.filter import isotonic_fit

NUM_DEPTHS = 16
"""Draft tokens at this depth and deeper share the last cell."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""The least length of each cell of a curve by length."""
AGREES, DIFFERS = "agrees", "differs"
"""What the drafter proposes beside a match that was found: the same, or something else."""
PROMPT = "prompt "
"""Before either: the match reaches back into the prompt. Most prompts end as all do, with the same
8 tokens of a chat template, say: a match of them tells nothing of the answer."""
MOST = 512
"""Depths and lengths up to this are looked up; none is longer."""
CELL_OF_LENGTH = tuple(sum(least <= at for least in LENGTHS[1:]) for at in range(2 * MOST))
CELL_OF_DEPTH = tuple(min(at, NUM_DEPTHS - 1) for at in range(MOST))

MATCH_PRIOR = (0.25, 0.45, 0.55, 0.6, 0.7, 0.72, 0.75, 0.8, 0.8, 0.82, 0.9, 0.92, 0.95)
"""Prior by length: as in the chats."""
DIFFERING_MATCH_PRIOR = tuple(rate * rate for rate in MATCH_PRIOR)
"""The same where the drafter proposes something else."""
PROMPT_MATCH_PRIOR = (0.1,) * 10 + (0.3, 0.5, 0.7)
"""The same where the match reaches back into the prompt."""
DRAFT_PRIOR = 0.9
"""Prior at any depth. High, for what is asked is soon known, and what is not asked never."""
LOOKAHEAD_PRIOR = (0.03, 0.2, 0.25, 0.55, 0.55, 0.7, 0.35, 0.35, 0.7, 0.65)
"""Prior by the kinds of `lookahead`."""
PRIOR_WEIGHT = 2.0
"""The prior counts as so many draft tokens, always: no rate is ever 0 or 1."""
DECAY = 1 - 1 / 64
"""Weight of an observation after the next of the same cell."""
SEQUENCE_DECAY = 0.9
"""The same for a sequence's own: ten steps say what it is like now."""
SHRINK, DRAFTED_SHRINK = 2.0, 6.0
"""So many accepted and rejected tokens count as expected beside a sequence's own; those of a
drafter are many, and sequences differ less in them."""


class SequenceOdds:
    """Accepted and rejected draft tokens of one sequence beside the expected ones, by proposer.

    >>> odds = SequenceOdds()
    >>> odds.observe("lookup", 2.0, 2.0, 0.0, 0.5)
    >>> odds.factor("lookup")
    1.25
    """

    __slots__ = ("_by_proposer",)

    def __init__(self) -> None:
        self._by_proposer: dict[str, tuple[float, float, float, float]] = {}

    def factor(self, proposer: str, shrink: float = SHRINK) -> float:
        """Return by how much the expected odds of acceptance are multiplied."""
        counts = self._by_proposer.get(proposer)
        if counts is None:
            return 1.0
        accepted, expected_accepted, rejected, expected_rejected = counts
        more = (accepted + shrink) / (expected_accepted + shrink)
        return more * (expected_rejected + shrink) / (rejected + shrink)

    def observe(self, proposer: str, *new: float) -> None:
        """Add counts: accepted, expected to be, rejected, expected to be."""
        before = self._by_proposer.get(proposer, (0.0, 0.0, 0.0, 0.0))
        a, b, c, d = (SEQUENCE_DECAY * old + more for old, more in zip(before, new, strict=True))
        self._by_proposer[proposer] = a, b, c, d


class Curve:
    """Acceptance rate by cell, over all sequences."""

    __slots__ = ("_accepted", "_is_stale", "_prior", "_rates", "_reached")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self._prior = prior
        self._reached = [0.0] * len(prior)
        self._accepted = [0.0] * len(prior)
        self._rates = list(prior)
        self._is_stale = False

    def observe(self, reached: tuple[int, ...], num_accepted: int) -> float:
        """Draft tokens of these cells were reached, the first `num_accepted` of them accepted;
        return how many were expected to be."""
        expected = sum([self._rates[cell] for cell in reached])
        for depth, cell in enumerate(reached):
            self._reached[cell] = DECAY * self._reached[cell] + 1
            self._accepted[cell] = DECAY * self._accepted[cell] + (depth < num_accepted)
        self._is_stale = True
        return expected

    @property
    def rates(self) -> list[float]:
        """By cell."""
        if self._is_stale:
            self._is_stale = False
            self._rates = self._fit([count + PRIOR_WEIGHT for count in self._reached])
        return self._rates

    def _fit(self, weights: list[float]) -> list[float]:
        """The rates, where each cell has so many observations, its prior among them."""
        return [
            (accepted + PRIOR_WEIGHT * prior) / weight
            for accepted, prior, weight in zip(self._accepted, self._prior, weights)
        ]


class RisingCurve(Curve):
    """Rises with the length of the match: where the observations say the contrary, their mean."""

    __slots__ = ()

    def _fit(self, weights: list[float]) -> list[float]:
        return isotonic_fit(super()._fit(weights), weights)


class LevelCurve(Curve):
    """The prior of each depth is the rate of all: what is known of some tells of those unseen."""

    __slots__ = ()

    def _fit(self, weights: list[float]) -> list[float]:
        accepted = sum(self._accepted) + PRIOR_WEIGHT * self._prior[0]
        mean = accepted / (sum(self._reached) + PRIOR_WEIGHT)
        return [
            (accepted + PRIOR_WEIGHT * mean) / weight
            for accepted, weight in zip(self._accepted, weights)
        ]


class PendingProposal(NamedTuple):
    """A proposal for the tokens from position `start` on, whose outcome is not known yet.

    It is scored by the tokens that came, whether or not a step verified it, so a request that
    begins to copy is seen before a row is spent on it:

        proposed behind t9   a b c d        came   a b x     2 accepted, 1 rejected
                                            came   a b       2 accepted; of c nothing is known
    """

    start: int
    proposal: Proposal
    context: str


class Acceptance:
    """Acceptance rates of all proposers; `context` is one of the words above, or ""."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, bool, str], Curve] = {}

    def probabilities(
        self, proposer: str, match: Match, count: int, odds: SequenceOdds, context: str = ""
    ) -> list[float]:
        """Return for each of `count` draft tokens the probability that it is accepted.

        >>> values = Acceptance().probabilities("lookup", 2, 3, SequenceOdds())
        >>> [round(each, 2) for each in values]
        [0.45, 0.25, 0.15]
        """
        rates = self._curve(proposer, match, context).rates
        factor = odds.factor(proposer, SHRINK if match else DRAFTED_SHRINK)
        probability, probabilities = 1.0, []
        for cell in cells(match, count):
            rate = rates[cell]
            probability *= rate * factor / (1 + rate * (factor - 1))
            probabilities.append(probability)
        return probabilities

    def rates(self, proposer: str, match: Match) -> list[float]:
        """Return the acceptance rate of draft tokens that are reached, by cell."""
        return self._curve(proposer, match, "").rates

    def observe(
        self,
        proposer: str,
        match: Match,
        num_drafts: int,
        num_accepted: int,
        odds: SequenceOdds,
        context: str = "",
    ) -> None:
        """Of `num_drafts` tokens the first `num_accepted` were right; of those behind the first
        that was wrong nothing is known."""
        if num_drafts < 1:
            return
        reached = cells(match, min(num_accepted + 1, num_drafts))
        expected = self._curve(proposer, match, context).observe(reached, num_accepted)
        count = len(reached)
        odds.observe(proposer, num_accepted, expected, count - num_accepted, count - expected)

    def score(
        self, proposer: str, pending: PendingProposal, tokens: list[int], odds: SequenceOdds
    ) -> int:
        """Learn from a proposal, as far as the `tokens` that are known now tell; return how many of
        its draft tokens were right."""
        draft_ids, match = pending.proposal
        actual = tokens[pending.start : pending.start + len(draft_ids)]
        num_right = common_prefix(draft_ids, actual)
        self.observe(proposer, match, len(actual), num_right, odds, pending.context)
        return num_right

    def _curve(self, proposer: str, match: Match, context: str) -> Curve:
        key = proposer, bool(match), context
        curve = self._curves.get(key)
        if curve is None:
            if isinstance(match, tuple):
                curve = Curve(LOOKAHEAD_PRIOR)
            elif match:
                curve = RisingCurve(prior_of(context))
            else:
                curve = LevelCurve((DRAFT_PRIOR,) * NUM_DEPTHS)
            self._curves[key] = curve
        return curve


def prior_of(context: str) -> tuple[float, ...]:
    """By length, the acceptance rate before any was seen."""
    if context.startswith(PROMPT):
        return PROMPT_MATCH_PRIOR
    return DIFFERING_MATCH_PRIOR if context == DIFFERS else MATCH_PRIOR


def cells(match: Match, count: int) -> tuple[int, ...]:
    """The cells of `count` draft tokens: their kinds, or lengths, or depths."""
    if isinstance(match, tuple):
        return match[:count]
    if match:
        return CELL_OF_LENGTH[match : match + count]
    return CELL_OF_DEPTH[:count]
