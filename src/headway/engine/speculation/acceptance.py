"""What share of guesses is kept: learned from all requests, and moved by a request's own.

A source that found a match of m tokens again is as right as its match is long, and each guess that
is kept lengthens the match by one. So one curve by length says all of it; measured with `lookup` on
150 real chats, the share kept of those guesses that were reached:

    behind a match of     1     2     3     4     5     6     7     8
    the first guess     0.26  0.45  0.56  0.57  0.7 … 0.75       0.8
    match 1, guess 1 …  0.26  0.46  0.60  0.66  0.73  0.71  0.76  0.81     along its own guesses

A source without a match, a drafting model, has a share for each depth of the guess instead, which
is that of all depths as long as few were seen so deep. What is learned never falls with the length;
the chance that a guess is reached and kept is the product of the shares up to it, behind a match of
2: 0.45, 0.25, 0.14.

(Replayed: 0.533 nats a guess with one curve, 0.533 with one for each depth, 0.634 by depth alone.)
Old observations fade, and a request's own say how much more or less is kept of its guesses than
was expected of them: as odds, shrunk to 1 as long as there are few (`Own`).
"""

from headway.engine.knots import rising
from headway.engine.speculation.lookup import Match

NUM_DEPTHS = 16
"""Guesses at this depth and deeper share the last cell."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""The least length of each cell of a curve by length."""
WITH, AGAINST = "with", "against"
"""What a drafter says beside a guess that was found: the same, or something else."""
BEGINS = "begins "
"""Before either: the match reaches back into the prompt. Most prompts end as all do, with the same
8 tokens of a chat template, say: a match of them tells nothing of the answer."""
MOST = 512
"""Guesses and lengths up to this are looked up; none is longer."""
CELL_OF_LENGTH = tuple(sum(least <= at for least in LENGTHS[1:]) for at in range(2 * MOST))
CELL_OF_DEPTH = tuple(min(at, NUM_DEPTHS - 1) for at in range(MOST))

FOUND = (0.25, 0.45, 0.55, 0.6, 0.7, 0.72, 0.75, 0.8, 0.8, 0.82, 0.9, 0.92, 0.95)
"""By length, what is kept before any was seen: as in the chats."""
CONTRADICTED = tuple(share * share for share in FOUND)
"""The same where the drafter says something else."""
BEGUN = (0.1,) * 10 + (0.3, 0.5, 0.7)
"""The same where the match reaches back into the prompt: what is kept of these guesses is seen
whether they are verified or not."""
DRAFTED = 0.9
"""At any depth. High, for what is asked is soon known, and what is not asked never."""
POOLED = (0.03, 0.2, 0.25, 0.55, 0.55, 0.7, 0.35, 0.35, 0.7, 0.65)
"""By the kinds of `lookahead`."""
PRIOR = 2.0
"""The prior counts as so many guesses, always: no share is ever 0 or 1."""
FADE = 1 - 1 / 64
"""What an observation is worth after the next of the same cell. From 16 to 256 the replayed answers
are predicted alike; but 32 sequences give 32 observations a step, and who guesses where the share
is thought too high, and not where it is thought too low, loses what noise promises."""
OWN_FADE = 0.9
"""The same for a request's own: ten steps say what it is like now."""
SHRINK, DRAFTED_SHRINK = 2.0, 6.0
"""So many guesses kept, and as many lost, of a request count as expected beside its own; those of a
drafter are many, and requests differ less in them: with 2 its chances were noise."""


class Own:
    """Beside what was expected of a request's guesses, what was kept of them, by source.

    >>> own = Own()
    >>> own.saw("lookup", 2.0, 2.0, 0.0, 0.5)
    >>> own.odds("lookup")
    1.25
    """

    __slots__ = ("_by_source",)

    def __init__(self) -> None:
        self._by_source: dict[str, tuple[float, float, float, float]] = {}

    def odds(self, source: str, shrink: float = SHRINK) -> float:
        """How many times the expected odds its guesses have."""
        seen = self._by_source.get(source)
        if seen is None:
            return 1.0
        kept, expected_kept, lost, expected_lost = seen
        more = (kept + shrink) / (expected_kept + shrink)
        return more * (expected_lost + shrink) / (lost + shrink)

    def saw(
        self, source: str, kept: float, expected_kept: float, lost: float, expected_lost: float
    ) -> None:
        """One more verification: how many guesses were kept and lost, and were expected to be."""
        before = self._by_source.get(source, (0.0, 0.0, 0.0, 0.0))
        self._by_source[source] = (
            OWN_FADE * before[0] + kept,
            OWN_FADE * before[1] + expected_kept,
            OWN_FADE * before[2] + lost,
            OWN_FADE * before[3] + expected_lost,
        )


class Curve:
    """The share kept by cell, of all requests."""

    __slots__ = ("_hits", "_is_stale", "_prior", "_shares", "_tries")

    def __init__(self, prior: tuple[float, ...]) -> None:
        self._prior = prior
        self._tries = [0.0] * len(prior)
        self._hits = [0.0] * len(prior)
        self._shares = list(prior)
        self._is_stale = False

    def learn(self, reached: tuple[int, ...], num_kept: int) -> None:
        """Guesses of these cells were reached, and the first `num_kept` of them kept."""
        tries, hits = self._tries, self._hits
        for depth, cell in enumerate(reached):
            tries[cell] = FADE * tries[cell] + 1
            hits[cell] = FADE * hits[cell] + (depth < num_kept)
        self._is_stale = True

    @property
    def lately(self) -> list[float]:
        """`shares` as they were when somebody last asked for those."""
        return self._shares

    @property
    def shares(self) -> list[float]:
        """By cell."""
        if self._is_stale:
            self._is_stale = False
            tries = [seen + PRIOR for seen in self._tries]
            self._shares = self._settled(tries)
        return self._shares

    def _settled(self, tries: list[float]) -> list[float]:
        """The shares, where so many guesses count for each cell, its prior among them."""
        pairs = zip(self._hits, self._prior, tries)
        return [(hits + PRIOR * prior) / seen for hits, prior, seen in pairs]


class Rising(Curve):
    """It rises with the cell: where the observations say the contrary, their mean."""

    __slots__ = ()

    def _settled(self, tries: list[float]) -> list[float]:
        return rising(super()._settled(tries), tries)


class Levelled(Curve):
    """The prior of each cell is the share of all: what is known of some tells of those unseen."""

    __slots__ = ()

    def _settled(self, tries: list[float]) -> list[float]:
        mean = (sum(self._hits) + PRIOR * self._prior[0]) / (sum(self._tries) + PRIOR)
        return [(hits + PRIOR * mean) / seen for hits, seen in zip(self._hits, tries)]


class Acceptance:
    """The chances of guesses, by source; `observe` what came of them to keep it true."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, bool, str], Curve] = {}

    def chances(
        self, source: str, match: Match, count: int, own: Own, beside: str = ""
    ) -> list[float]:
        """For each of `count` guesses behind a match of `match` tokens the chance that it is
        reached and kept; `match` 0: a source that has none. Or it is their kinds.

        >>> chances = Acceptance().chances("lookup", 2, 3, Own())
        >>> [round(chance, 2) for chance in chances]
        [0.45, 0.25, 0.15]
        """
        shares = self._curve(source, match, beside).shares
        odds = own.odds(source, SHRINK if match else DRAFTED_SHRINK)
        chance, chances = 1.0, []
        for cell in cells(match, count):
            share = shares[cell]
            chance *= share * odds / (1 + share * (odds - 1))
            chances.append(chance)
        return chances

    def first(self, source: str, match: Match, own: Own, beside: str = "") -> float:
        """The chance of the first guess, as `chances` has it: none behind it is likelier.

        >>> round(Acceptance().first("lookup", 2, Own()), 2)
        0.45
        """
        shares = self._curve(source, match, beside).shares
        if isinstance(match, tuple):
            share, odds = shares[match[0]], own.odds(source)
        elif match:
            share, odds = shares[CELL_OF_LENGTH[match]], own.odds(source)
        else:
            share, odds = shares[0], own.odds(source, DRAFTED_SHRINK)
        return share * odds / (1 + share * (odds - 1))

    def shares(self, source: str, match: Match) -> list[float]:
        """Of all requests the share kept of guesses that are reached, by cell."""
        return self._curve(source, match, "").shares

    def observe(
        self,
        source: str,
        match: Match,
        num_guessed: int,
        num_kept: int,
        own: Own,
        beside: str = "",
    ) -> None:
        """Of `num_guessed` guesses the first `num_kept` were right; of those behind the first that
        was wrong nothing is known."""
        if num_guessed < 1:
            return
        curve = self._curve(source, match, beside)
        reached = cells(match, min(num_kept + 1, num_guessed))
        shares = curve.lately
        expected = sum([shares[cell] for cell in reached])
        curve.learn(reached, num_kept)
        own.saw(source, num_kept, expected, len(reached) - num_kept, len(reached) - expected)

    def _curve(self, source: str, match: Match, beside: str) -> Curve:
        key = source, bool(match), beside
        curve = self._curves.get(key)
        if curve is None:
            if isinstance(match, tuple):
                curve = Curve(POOLED)
            elif match:
                curve = Rising(prior_of(beside))
            else:
                curve = Levelled((DRAFTED,) * NUM_DEPTHS)
            self._curves[key] = curve
        return curve


def prior_of(beside: str) -> tuple[float, ...]:
    """By length, what is kept of guesses that were found, before any was seen."""
    if beside.startswith(BEGINS):
        return BEGUN
    return CONTRADICTED if beside == AGAINST else FOUND


def cells(match: Match, count: int) -> tuple[int, ...]:
    """The cells of `count` guesses: their kinds, or behind a match, or those of their depths."""
    if isinstance(match, tuple):
        return match[:count]
    if match:
        return CELL_OF_LENGTH[match : match + count]
    return CELL_OF_DEPTH[:count]
