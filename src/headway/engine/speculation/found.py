"""What guesses that cost nothing will bring in the next step, where the drafter is not asked.

The drafter is worth what it brings beyond them, and its time is time in which they bring as well:

    one stream of copies                    found    drafted    the drafter brings
    the guess of this step goes on          5.5      3.5        0
    it breaks off, or there is none         1.0      3.5        2.5 tokens

Learned from all requests by what became of the guess before; one that is still right when the next
step begins goes on, for its match has grown. And the answer may be over by then: a guess of a short
copy mostly breaks off where the answer ends, and what is drafted in that step is for nobody.
"""

from collections.abc import Sequence
from typing import NamedTuple

WENT_ON, BROKE_OFF, UNKNOWN = range(3)
"""What became of the guess that was found before; of none that is known."""
FADE = 1 - 1 / 32
PRIOR = 2.0
"""Guesses of the drafter that were right, and not found, before any was seen; so many steps."""
TINY = 1e-9


class Expected(NamedTuple):
    """Tokens that guesses are expected to bring, and the rows that they take."""

    tokens: float = 0.0
    rows: float = 0.0


class Lately:
    """Of one case, older steps fading: in how many steps so many tokens were found in so many
    rows; and of what the drafter guessed right, how much, and how much of it was not found."""

    __slots__ = ("becomes", "drafted", "ends", "found", "missing", "rows", "steps")

    def __init__(self) -> None:
        self.steps = self.drafted = self.missing = self.becomes = PRIOR
        self.found = self.rows = self.ends = 0.0
        """`ends` of those that it `becomes` were the last step of an answer."""


class Found:
    """What is found in a step, by what became of the guess before.

    >>> found = Found()
    >>> for _ in range(99): found.saw(WENT_ON, 3, 4, num_drafted=4)
    >>> share, expected = found.beside([0.6, 0.5], 0)
    >>> round(share, 2), round(expected.rows, 1)
    (0.55, 2.4)
    """

    def __init__(self) -> None:
        self._cases = [Lately() for _ in range(3)]

    def saw(self, became: int, num_found: int, num_rows: int, num_drafted: int | None) -> None:
        """Of a sequence whose guess before `became` that, so many tokens were found in so many rows
        that pay, and so many drafted; None: nothing was drafted."""
        lately = self._cases[became]
        lately.steps = FADE * lately.steps + 1
        lately.found = FADE * lately.found + num_found
        lately.rows = FADE * lately.rows + num_rows
        if num_drafted is not None:
            lately.drafted = FADE * lately.drafted + num_drafted
            lately.missing = FADE * lately.missing + max(num_drafted - num_found, 0)

    def became(self, became: int) -> None:
        """That is what became of a sequence's guess in this step."""
        lately = self._cases[became]
        lately.becomes, lately.ends = FADE * lately.becomes + 1, FADE * lately.ends

    def passed(self, count: int) -> None:
        """So many went on of whose guess nothing is known."""
        if count:
            lately, kept = self._cases[UNKNOWN], FADE**count
            lately.becomes = kept * lately.becomes + (1 - kept) / (1 - FADE)
            lately.ends *= kept

    def ended(self, became: int) -> None:
        """And that was the last of its answer."""
        self._cases[became].ends += 1

    def beside(self, chances: Sequence[float], num_riding: int) -> tuple[float, Expected]:
        """(The share of the drafter's tokens that will not be found and are of use, what will be
        found), where of a guess with these `chances` so many ride in this step."""
        goes_on = chances[min(num_riding, len(chances) - 1)] if chances else 0.0
        share = tokens = rows = 0.0
        for became, part in ((WENT_ON, goes_on), (BROKE_OFF if chances else UNKNOWN, 1 - goes_on)):
            lately = self._cases[became]
            part *= 1 - min(lately.ends / lately.becomes, 1.0)
            share += part * lately.missing / max(lately.drafted, TINY)
            tokens += part * lately.found / lately.steps
            rows += part * lately.rows / lately.steps
        return share, Expected(tokens, rows)


def became_of(found: list[int], came: list[int]) -> int:
    """What became of the guess `found`, where these tokens came; empty: there was none.

    >>> [became_of(found, [5, 6]) for found in ([5, 6, 7], [5], [5, 7], [])]
    [0, 0, 1, 2]
    """
    both = min(len(found), len(came))
    if not both:
        return UNKNOWN
    return WENT_ON if found[:both] == came[:both] else BROKE_OFF
