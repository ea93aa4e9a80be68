"""What is known of one sequence's guesses, and the best of them in a step."""

from typing import NamedTuple

from headway.engine.speculation.acceptance import AGAINST, WITH, Own
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.found import UNKNOWN
from headway.engine.speculation.paths import Rival
from headway.engine.speculation.rests import ONCE_IN, PATIENCE
from headway.engine.speculation.shadow import Shadow

EMPTY = Drafts([])


class Candidate(NamedTuple):
    """What a source guesses of a sequence: the chance of each guess, and what its row is worth; and
    another source's guesses that may ride beside them."""

    drafts: Drafts
    chances: list[float]
    values: list[float]
    rival: Rival | None = None

    def first(self, count: int, more: int) -> Drafts:
        """The first `count` guesses; beside them what the rival shares, and `more` of its own."""
        drafts, rival, others = self.drafts, self.rival, list[Drafts]()
        if more and rival is not None:
            token_ids = rival.drafts.token_ids[: rival.shared + more]
            others.append(rival.drafts._replace(token_ids=token_ids))
        return drafts._replace(token_ids=drafts.token_ids[:count], others=others)

    def chance_of_end(self, count: int, stop_ids: frozenset[int]) -> float:
        """The chance that the first `count` guesses are right and end the answer."""
        ends = count > 0 and self.drafts.token_ids[count - 1] in stop_ids
        return self.chances[count - 1] if ends else 0.0


NO_CANDIDATE = Candidate(EMPTY, [], [])


class Guessing:
    """What is known of one sequence's guesses."""

    __slots__ = (
        *("became", "best", "drafted", "found", "num_paying"),
        *("num_unpaid", "own", "proposed", "shadows"),
    )

    def __init__(self, shadows: dict[str, Shadow]) -> None:
        self.own, self.shadows = Own(), shadows
        self.proposed: list[int] = []
        """What the drafter guesses of the next tokens."""
        self.drafted: list[int] = []
        """The same of the tokens that this step brings."""
        self.best = self.found = NO_CANDIDATE
        """What was the best guess of these; and of those that cost nothing."""
        self.became, self.num_paying = UNKNOWN, -1
        """What became of that before; how many guesses of it pay now, -1: not all looked."""
        self.num_unpaid = 0
        """Steps since a guess of it was verified."""

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
