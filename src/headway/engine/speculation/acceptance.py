"""Probability that the k-th draft token is accepted, by proposer and by sequence.

A proposer with a match of m tokens is the more accurate the longer the match, and each accepted
token lengthens the match by one. So one curve by length describes all; measured with n-grams on 150
real chats, the acceptance rate of the tokens that were reached:

    behind a match of     1     2     3     4     5     6     7     8
    the first token     0.26  0.45  0.56  0.57  0.7 … 0.75       0.8
    match 1, token 1 …  0.26  0.46  0.60  0.66  0.73  0.71  0.76  0.81     along one proposal

A proposer without a match, such as a draft model, has a rate per depth instead. The probability
that a token is accepted is the product of the rates up to it: behind a match of 2 it is 0.45, 0.25,
0.15. All counts decay. A sequence's own counts say how its rates differ from the mean: as odds,
shrunk to 1 as long as there are few observations (`SequenceOdds`).
"""

from typing import NamedTuple

from headway.engine.speculation.drafts import Match, common_prefix
from headway.engine.speculation.proposers.proposal import Proposal
from headway.perf.filter import isotonic_fit

NUM_DEPTHS = 16
"""Draft tokens at this depth and deeper share the last cell."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Minimum length of each cell of a curve by length."""
AGREES, DIFFERS = "agrees", "differs"
"""Context of a match: the drafter proposes the same tokens, or others."""
PROMPT = "prompt "
"""Prefix of a context: the match reaches back into the prompt. Most prompts end alike, for example
with the same 8 tokens of a chat template, so such a match says nothing about the answer."""
MAX_INDEX = 512
"""Maximum depth and length in the lookup tables."""
CELL_OF_LENGTH = tuple(sum(least <= at for least in LENGTHS[1:]) for at in range(2 * MAX_INDEX))
CELL_OF_DEPTH = tuple(min(at, NUM_DEPTHS - 1) for at in range(MAX_INDEX))

MATCH_PRIOR = (0.25, 0.45, 0.55, 0.6, 0.7, 0.72, 0.75, 0.8, 0.8, 0.82, 0.9, 0.92, 0.95)
"""Prior by length, as in the chats."""
DIFFERING_MATCH_PRIOR = tuple(rate * rate for rate in MATCH_PRIOR)
"""Prior by length if the drafter proposes something else."""
PROMPT_MATCH_PRIOR = (0.1,) * 10 + (0.3, 0.5, 0.7)
"""Prior by length if the match reaches back into the prompt."""
DRAFT_PRIOR = 0.9
"""Prior at any depth. It is high, because only a drafter in use can correct it."""
LOOKAHEAD_PRIOR = (0.03, 0.2, 0.25, 0.55, 0.55, 0.7, 0.35, 0.35, 0.7, 0.65)
"""Prior by the kinds of `lookahead`."""
PRIOR_WEIGHT = 2.0
"""Weight of the prior in draft tokens, always: no rate is ever 0 or 1."""
DECAY = 1 - 1 / 64
"""Weight of an observation after the next one of the same cell."""
SEQUENCE_DECAY = 0.9
"""The same for a sequence's own counts: about ten steps."""
SHRINK, DRAFTED_SHRINK = 2.0, 6.0
"""Accepted and rejected tokens that count as expected in addition to a sequence's own; a drafter
has many observations, and its rates differ less between sequences."""


class SequenceOdds:
    """Accepted and rejected draft tokens of one sequence against the expected ones, by proposer.

    >>> odds = SequenceOdds()
    >>> odds.observe("lookup", 2.0, 2.0, 0.0, 0.5)
    >>> odds.factor("lookup")
    1.25
    """

    __slots__ = ("_by_proposer",)

    def __init__(self) -> None:
        self._by_proposer: dict[str, tuple[float, float, float, float]] = {}

    def factor(self, proposer: str, shrink: float = SHRINK) -> float:
        """Return the factor on the expected odds of acceptance."""
        counts = self._by_proposer.get(proposer)
        if counts is None:
            return 1.0
        accepted, expected_accepted, rejected, expected_rejected = counts
        more = (accepted + shrink) / (expected_accepted + shrink)
        return more * (expected_rejected + shrink) / (rejected + shrink)

    def observe(self, proposer: str, *new: float) -> None:
        """Add counts: accepted, expected accepted, rejected, expected rejected."""
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
        """Add draft tokens of these cells, of which the first `num_accepted` were accepted.

        Returns the expected number of accepted ones.
        """
        expected = sum([self._rates[cell] for cell in reached])
        for depth, cell in enumerate(reached):
            self._reached[cell] = DECAY * self._reached[cell] + 1
            self._accepted[cell] = DECAY * self._accepted[cell] + (depth < num_accepted)
        self._is_stale = True
        return expected

    @property
    def rates(self) -> list[float]:
        """Return the acceptance rates by cell."""
        if self._is_stale:
            self._is_stale = False
            self._rates = self._fit([count + PRIOR_WEIGHT for count in self._reached])
        return self._rates

    def _fit(self, weights: list[float]) -> list[float]:
        """Return the rates; `weights` are the observations of each cell, including the prior."""
        return [
            (accepted + PRIOR_WEIGHT * prior) / weight
            for accepted, prior, weight in zip(self._accepted, self._prior, weights)
        ]


class RisingCurve(Curve):
    """Rates that rise with the length of the match; falling neighbours share their mean."""

    __slots__ = ()

    def _fit(self, weights: list[float]) -> list[float]:
        return isotonic_fit(super()._fit(weights), weights)


class LevelCurve(Curve):
    """Rates by depth with a common prior, the mean: shallow depths inform about deeper ones."""

    __slots__ = ()

    def _fit(self, weights: list[float]) -> list[float]:
        accepted = sum(self._accepted) + PRIOR_WEIGHT * self._prior[0]
        mean = accepted / (sum(self._reached) + PRIOR_WEIGHT)
        return [
            (accepted + PRIOR_WEIGHT * mean) / weight
            for accepted, weight in zip(self._accepted, weights)
        ]


class PendingProposal(NamedTuple):
    """Proposal for the tokens from position `start` on, whose outcome is not known yet.

    It is scored by the actual tokens, whether or not a step verified it, so a request that begins
    to copy is noticed before a row is spent on it:

        proposed behind t9   a b c d        actual   a b x     2 accepted, 1 rejected
                                            actual   a b       2 accepted; c is unknown
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
        """Add the outcome of `num_drafts` tokens, the first `num_accepted` of them correct.

        Tokens after the first wrong one are not counted.
        """
        if num_drafts < 1:
            return
        reached = cells(match, min(num_accepted + 1, num_drafts))
        expected = self._curve(proposer, match, context).observe(reached, num_accepted)
        count = len(reached)
        odds.observe(proposer, num_accepted, expected, count - num_accepted, count - expected)

    def score(
        self, proposer: str, pending: PendingProposal, tokens: list[int], odds: SequenceOdds
    ) -> int:
        """Learn from a proposal, given the known `tokens`; returns its number of correct tokens."""
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
    """Return the prior acceptance rates by length."""
    if context.startswith(PROMPT):
        return PROMPT_MATCH_PRIOR
    return DIFFERING_MATCH_PRIOR if context == DIFFERS else MATCH_PRIOR


def cells(match: Match, count: int) -> tuple[int, ...]:
    """Return the cells of `count` draft tokens: their kinds, or lengths, or depths."""
    if isinstance(match, tuple):
        return match[:count]
    if match:
        return CELL_OF_LENGTH[match : match + count]
    return CELL_OF_DEPTH[:count]
