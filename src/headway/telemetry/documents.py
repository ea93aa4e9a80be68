"""Which documents of a prompt its answer drew on, by the words they share. Numbers, never text.

An answer used a document where it says a word that stands in the document, in none of the text that
is no document, and in no more than two of the documents, or half of them: others tell of none.

    document 1     Anna has a red kite.       "red" tells of it, "Anna" is the question's
    document 2     Tom has a blue ball.
    question       What colour is the kite of Anna?
    answer         Red.                       document 1 was used, document 2 was not

What an answer says in words of its own is not seen, and a long answer shares a word with documents
that it did not need: docs/shorter-prompts.md has how often either is wrong. Answers are looked at
when they end, for a small share of the time; their words are not kept.
"""

import hashlib
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headway.core.clock import Clock

WORD = re.compile(r"\w+")
KEPT_ANSWERS = 256
MOST_DOCUMENTS = 4096
MOST_CHARACTERS = 1 << 18
"""Prompts with more text are not looked at."""
FEW_SHOWN = 5
"""Answers before which a document stood until it is said that none used it."""
MOST_PLACES = 8
WORK_SHARE = 0.02
"""Looking takes at most this share of the time."""


class Place(msgspec.Struct, kw_only=True):
    """Of the documents that stood at one place of their prompts: how many, and how many were used;
    the last place is that of all behind it."""

    shown: int = 0
    used: int = 0


class DocumentUse(msgspec.Struct, kw_only=True):
    """Of the last answers that had documents before them: the documents, those that they used, the
    tokens of both, and seconds of an answer's prefill for what it did not use.

    `requests` prompts had documents since the start; not all of their answers are looked at.
    `idle` documents stood before at least five answers, and none of these used them; they take
    `idle_tokens` of a prompt in the mean.
    """

    answers: int = 0
    requests: int = 0
    shown: int = 0
    used: int = 0
    tokens: int = 0
    unused_tokens: int = 0
    unused_s: float = 0.0
    idle: int = 0
    idle_tokens: float = 0.0
    places: list[Place] = []


@dataclass(frozen=True, slots=True)
class Watched:
    """The documents of one prompt: key, tokens, and the words that tell of each."""

    keys: list[bytes]
    tokens: list[int]
    telling: list[frozenset[str]]


# ── one prompt, one answer ──────────────────────────────────────────────────────────────────


def words(text: str) -> set[str]:
    """Its words and numbers, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def telling_words(documents: Sequence[str], rest: Iterable[str]) -> list[frozenset[str]]:
    """The words of each document by which an answer would show that it drew on it.

    >>> sorted(telling_words(["Anna has a kite", "Tom has a ball"], ["Anna's toy"])[0])
    ['a', 'has', 'kite']
    """
    said = set[str]().union(*map(words, rest))
    each = [words(document) - said for document in documents]
    count = Counter(word for those in each for word in those)
    most = max(len(documents) / 2, 2)
    return [frozenset(word for word in those if count[word] <= most) for those in each]


def used(telling: Sequence[frozenset[str]], answers: Iterable[str]) -> list[bool]:
    """Which of the documents with these telling words some of the answers drew on."""
    said = set[str]().union(*map(words, answers))
    return [not those.isdisjoint(said) for those in telling]


# ── all of them ─────────────────────────────────────────────────────────────────────────────


class DocumentTally:
    """What the last answers used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: deque[tuple[list[int], list[bool]]] = deque(maxlen=KEPT_ANSWERS)
        self._seen: OrderedDict[bytes, list[int]] = OrderedDict()
        """Digest → answers behind it, those that used it, its tokens; the oldest first."""
        self._again_s = -float("inf")
        self._requests = 0

    def watch(
        self, documents: Sequence[str], rest: Sequence[str], num_tokens: int
    ) -> Watched | None:
        """What to know of a prompt of so many tokens when its answer ends; None while others were
        looked at for their share of the time. Any thread may call."""
        self._requests += 1
        size = sum(map(len, documents))
        whole = size + sum(map(len, rest))
        started_s = self._clock.now_s()
        if not size or whole > MOST_CHARACTERS or started_s < self._again_s:
            return None
        telling = telling_words(documents, rest)
        keys = [
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            for text in documents
        ]
        tokens = [round(num_tokens * len(text) / whole) for text in documents]
        spent_s = self._clock.now_s() - started_s
        self._again_s = started_s + spent_s / WORK_SHARE
        return Watched(keys, tokens, telling)

    def answered(self, watched: Watched, answers: Iterable[str]) -> None:
        """All answers to that prompt have ended."""
        found = used(watched.telling, answers)
        self._answers.append((watched.tokens, found))
        for key, tokens, is_used in zip(watched.keys, watched.tokens, found, strict=True):
            counts = self._seen.setdefault(key, [0, 0, 0])
            counts[0] += 1
            counts[1] += is_used
            counts[2] = tokens
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_DOCUMENTS:
            self._seen.popitem(last=False)

    def use(self, token_s: float) -> DocumentUse | None:
        """What they used; computing a prompt token takes `token_s`. None before any answer."""
        if not self._answers:
            return None
        found = DocumentUse(answers=len(self._answers), requests=self._requests)
        places = [Place() for _ in range(MOST_PLACES)]
        for tokens, are_used in self._answers:
            for number, (size, is_used) in enumerate(zip(tokens, are_used, strict=True)):
                place = places[min(number, MOST_PLACES - 1)]
                place.shown += 1
                place.used += is_used
                found.tokens += size
                found.unused_tokens += 0 if is_used else size
        found.places = [place for place in places if place.shown]
        found.shown = sum(place.shown for place in places)
        found.used = sum(place.used for place in places)
        idle = [(n, size) for n, uses, size in self._seen.values() if n >= FEW_SHOWN and not uses]
        behind = max(sum(n for n, _, _ in self._seen.values()), 1)
        found.idle = len(idle)
        found.idle_tokens = sum(n * size for n, size in idle) / behind * found.shown / found.answers
        found.unused_s = found.unused_tokens / found.answers * token_s
        return found
