"""Which units of the marked parts of a prompt stay.

What says nothing new goes first: a unit that stands before in the same part, or in an earlier one.
Of the others those of the highest score stay while they have room. A part's own units, what it was
asked for and the parts before it decide, so that what follows in a later turn changes nothing, and
a prefix cache finds a conversation again.
"""

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"\w+")
MIN_DUPLICATE = 12
"""Characters below which a unit may stand twice: "}", "Yes."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What stays, by unit, and tokens: of all, of what is left, of duplicates. Units are counted
    apart; a text may have a few tokens less than its units."""

    kept: list[bool]
    num_tokens: int
    num_left: int
    num_duplicate: int


class Seen:
    """What the parts so far have said."""

    def __init__(self) -> None:
        self._said: set[bytes] = set()

    def repeated(self, units: Sequence[str]) -> list[bool]:
        """Which of these units stand before, here or in an earlier part."""
        found = []
        for unit in units:
            text = unit.strip(" \t\n,;.")
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            found.append(len(text) >= MIN_DUPLICATE and key in self._said)
            self._said.add(key)
        return found


def choose(
    sizes: Sequence[int], repeated: Sequence[bool], scores: Sequence[float], keep: float
) -> Choice:
    """Which units stay so that at most `keep` of the tokens do; one stays whatever its size.

    `sizes` are the units' tokens, `scores` what they are worth.

    >>> choose([4, 4, 4, 4], [False, False, True, False], [1.0, 3.0, 9.0, 2.0], 0.5).kept
    [False, True, False, True]
    """
    total, left = sum(sizes), 0
    room = keep * total
    kept = [False] * len(sizes)
    new = [i for i, again in enumerate(repeated) if not again] or [0]
    for i in sorted(new, key=lambda i: (-scores[i], i)):
        if left + sizes[i] <= room:
            kept[i] = True
            left += sizes[i]
    if not any(kept):
        best = max(new, key=lambda i: (scores[i], -i))
        kept[best], left = True, sizes[best]
    return Choice(
        kept=kept,
        num_tokens=total,
        num_left=left,
        num_duplicate=sum(size for size, again in zip(sizes, repeated, strict=True) if again),
    )


def by_chance(units: Sequence[str]) -> list[float]:
    """Scores that say nothing, to compare with: drawn anew for other units, the same for these."""
    draw = random.Random("\0".join(units))
    return [draw.random() for _ in units]


def relevance(units: Sequence[str], question: str) -> list[float]:
    """What each unit shares with the question, in nats: a word that k of n units have counts
    ln(n / k), as surprising as it is among them.

    >>> [round(nats, 1) for nats in relevance(["fox: 1", "cat: 2", "cow: 2"], "Look up the cat.")]
    [0.0, 1.1, 0.0]
    """
    asked = words(question)
    shared = [words(unit) & asked for unit in units]
    having = Counter(word for each in shared for word in each)
    return [sum(math.log(len(units) / having[word]) for word in sorted(each)) for each in shared]


def words(text: str) -> set[str]:
    """The words and numbers of a text, in small letters."""
    return set(WORD.findall(text.lower()))
