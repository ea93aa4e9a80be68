"""What is known of one sequence's guesses, and the best of them in a step."""

from typing import NamedTuple

from headway.engine.sequence import Sequence
from headway.engine.speculation.acceptance import AGAINST, WITH, Own
from headway.engine.speculation.drafts import Drafts, fitting
from headway.engine.speculation.found import UNKNOWN
from headway.engine.speculation.lookup import Guess
from headway.engine.speculation.rests import ONCE_IN, PATIENCE
from headway.engine.speculation.shadow import Shadow

EMPTY = Drafts([])


class Candidate(NamedTuple):
    """What a source guesses of a sequence: the chance of each guess, and what its row is worth."""

    drafts: Drafts
    chances: list[float]
    values: list[float]

    def first(self, count: int) -> Drafts:
        """The first `count` draft tokens."""
        return self.drafts._replace(token_ids=self.drafts.token_ids[:count])

    def chance_of_end(self, count: int, stop_ids: frozenset[int]) -> float:
        """The chance that the first `count` guesses are right and end the answer."""
        ends = count > 0 and self.drafts.token_ids[count - 1] in stop_ids
        return self.chances[count - 1] if ends else 0.0


NO_CANDIDATE = Candidate(EMPTY, [], [])


class Said(NamedTuple):
    """What somebody guesses of a sequence in a step, and what the drafter says `beside` it."""

    guess: Guess
    source: str
    beside: str = ""

    def fitting(self, sequence: Sequence, most: int) -> Drafts:
        """As far as it may follow `sequence`."""
        token_ids = fitting(sequence, self.guess.token_ids, most)
        return Drafts(token_ids, self.source, self.guess.match)


class Guessing:
    """What is known of one sequence's guesses; `shadows` are of the sources that it has, all of
    them but one for grammars where it has none."""

    __slots__ = (
        *("all_looked", "became", "best", "drafted", "found", "is_open", "num_paying"),
        *("num_unpaid", "own", "proposed", "said", "shadows"),
    )

    def __init__(self, shadows: dict[str, Shadow]) -> None:
        self.own, self.shadows = Own(), shadows
        self.said: list[Said] = []
        """What was guessed in this step, and whether every source looked."""
        self.all_looked = False
        self.is_open = False
        """Whether what comes tells of anything: somebody guessed since the last token, or what
        became of it is not counted yet."""
        self.proposed: list[int] = []
        """What the drafter guesses of the next tokens."""
        self.drafted: list[int] = []
        """The same of the tokens that this step brings."""
        self.best = self.found = NO_CANDIDATE
        """What was the best guess of these; and of those that cost nothing."""
        self.became, self.num_paying = UNKNOWN, -1
        """What became of that before; how many guesses of it pay now, -1: not all looked."""
        self.num_unpaid = 0
        """Looks since a guess of it was verified."""

    @property
    def looks(self) -> bool:
        """Whether the sources are asked: in every step, but of who gains nothing now and then."""
        return self.num_unpaid < PATIENCE or self.num_unpaid % ONCE_IN == 0 or bool(self.proposed)


def said_beside(guessed: list[int], drafted: list[int]) -> str:
    """What the drafter says to a guess of what follows the same tokens; "": nothing.

    >>> said_beside([5, 6, 7], [5, 6]), said_beside([5, 6, 7], [5, 8]), said_beside([5], [])
    ('with', 'against', '')
    """
    if not drafted:
        return ""
    both = min(len(guessed), len(drafted))
    return WITH if guessed[:both] == drafted[:both] else AGAINST
