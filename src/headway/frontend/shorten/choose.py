"""Choose the units of the marked parts of a prompt to keep.

Duplicates go first: units that occur before in the same part or in an earlier one. Of the others
those with the highest scores stay while there is room. The choice depends on a part's own units,
its question and the earlier parts, never on later turns, so that the prefix cache still matches.
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
"""Characters below which a unit is never a duplicate: "}", "Yes."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitChoice:
    """Units to keep (`mask`), and the tokens of all units, of the kept ones, and of duplicates.

    Units are counted separately; a text may have a few tokens less than its units together.
    """

    mask: list[bool]
    num_tokens: int
    num_tokens_after: int
    num_duplicate: int


class SeenUnits:
    """Digests of the units of the parts so far."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def repeated(self, units: Sequence[str]) -> list[bool]:
        """Return for each unit whether it occurs before, here or in an earlier part."""
        repeated = []
        for unit in units:
            text = unit.strip(" \t\n,;.")
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            repeated.append(len(text) >= MIN_DUPLICATE and key in self._digests)
            self._digests.add(key)
        return repeated


def choose(
    sizes: Sequence[int], repeated: Sequence[bool], scores: Sequence[float], keep: float
) -> UnitChoice:
    """Choose units with at most the share `keep` of the tokens, but at least one unit.

    `sizes` are the units' tokens, `scores` their values.

    >>> choose([4, 4, 4, 4], [False, False, True, False], [1.0, 3.0, 9.0, 2.0], 0.5).mask
    [False, True, False, True]
    """
    total, used = sum(sizes), 0
    room = keep * total
    mask = [False] * len(sizes)
    new = [i for i, again in enumerate(repeated) if not again] or [0]
    for i in sorted(new, key=lambda i: (-scores[i], i)):
        if used + sizes[i] <= room:
            mask[i] = True
            used += sizes[i]
    if not any(mask):
        best = max(new, key=lambda i: (scores[i], -i))
        mask[best], used = True, sizes[best]
    return UnitChoice(
        mask=mask,
        num_tokens=total,
        num_tokens_after=used,
        num_duplicate=sum(size for size, again in zip(sizes, repeated, strict=True) if again),
    )


def by_chance(units: Sequence[str]) -> list[float]:
    """Return random scores as a baseline, deterministic for the same units."""
    draw = random.Random("\0".join(units))
    return [draw.random() for _ in units]


def relevance(units: Sequence[str], question: str) -> list[float]:
    """Return the overlap of each unit with the question in nats.

    A word of the question that k of n units have counts ln(n / k).

    >>> [round(nats, 1) for nats in relevance(["fox: 1", "cat: 2", "cow: 2"], "Look up the cat.")]
    [0.0, 1.1, 0.0]
    """
    question_words = words(question)
    shared = [words(unit) & question_words for unit in units]
    having = Counter(word for each in shared for word in each)
    return [sum(math.log(len(units) / having[word]) for word in sorted(each)) for each in shared]


def words(text: str) -> set[str]:
    """Return the words and numbers of a text in lower case."""
    return set(WORD.findall(text.lower()))
