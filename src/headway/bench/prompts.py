"""Prompts as a list of pieces, and the writers that make token ids or words of them.

A `GeneratedPiece` is a number of tokens that follow from a key, always the same ones: two prompts
that begin with the same keys share that prefix on any server. Worked example:
(GeneratedPiece("prefix 3", 200), GeneratedPiece("request 17", 56)) shares 200 tokens with every
prompt of group 3.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

LOWEST_ID = 32
"""Ids below are special tokens in some vocabularies."""
DEFAULT_VOCABULARY = 500
"""A size that even the smallest models have; prompts need not be varied, only different."""
WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city name team minute idea kid body back parent face others level office door health "
    "person art war history party result change morning reason research girl guy moment teacher "
    "force order field music paper street table river sea tree light stone bird fish horse road "
    "letter window garden north south winter summer green blue white black".split()
)
MAX_PREFETCHED_TOKENS = 16_384
"""Tokens that are drawn at once."""
GOLDEN, MIX_1, MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SHIFT_1, SHIFT_2, SHIFT_3, HALF = map(np.uint64, (30, 27, 31, 32))


@dataclass(frozen=True, slots=True)
class GeneratedPiece:
    """`tokens` tokens that follow from `key` alone."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class IdPiece:
    """Token ids of a trace."""

    ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text from a file; its number of tokens is estimated at four characters each."""

    text: str

    @property
    def tokens(self) -> int:
        return max(1, len(self.text) // 4)


Piece = GeneratedPiece | IdPiece | TextPiece
Prompt = tuple[Piece, ...]


def num_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt as asked for."""
    return sum(piece.tokens for piece in prompt)


def draws(key: str, count: int, below: int) -> NDArray[np.int64]:
    """Return `count` numbers in [0, below) that follow from `key` (splitmix64 from its hash)."""
    start = int.from_bytes(hash_key(key), "little")
    return mix(multiples(1 << (count - 1).bit_length())[:count] + np.uint64(start), below)


def draws_of(keys: Sequence[str], counts: Sequence[int], below: int) -> NDArray[np.int64]:
    """Return the numbers of `draws` for each of these, concatenated.

    A call of numpy takes as long as hundreds of numbers.
    """
    table = multiples(1 << (max(counts, default=1) - 1).bit_length())
    starts = np.frombuffer(b"".join(map(hash_key, keys)), "<u8")
    places = np.concatenate([table[:0], *[table[:count] for count in counts]])
    return mix(places + np.repeat(starts, counts), below)


def hash_key(key: str) -> bytes:
    """Return the eight bytes from which all numbers of a key follow."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def mix(x: NDArray[np.uint64], below: int) -> NDArray[np.int64]:
    """Return numbers in [0, below) of multiples of GOLDEN: splitmix64's finalizer; `x` is
    overwritten."""
    x ^= x >> SHIFT_1
    x *= MIX_1
    x ^= x >> SHIFT_2
    x *= MIX_2
    x ^= x >> SHIFT_3
    x >>= HALF
    x %= np.uint64(below)
    return x.astype(np.int64)


@lru_cache(maxsize=32)
def multiples(count: int) -> NDArray[np.uint64]:
    """Return the first `count` multiples of GOLDEN, from the first on."""
    return np.arange(1, count + 1, dtype=np.uint64) * GOLDEN


class PromptWriter(Protocol):
    """A format of prompts in a body."""

    def json(self, prompt: Prompt) -> bytes:
        """Return the prompt as a JSON value."""
        ...

    def pieces(self, prompt: Prompt, limit: int) -> list[int] | list[str]:
        """Return its first tokens, or words, to find shared prefixes."""
        ...


class IdWriter:
    """Prompts as lists of token ids below `vocabulary`."""

    def __init__(self, seed: int, vocabulary: int = 0) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._high = max(vocabulary or DEFAULT_VOCABULARY, LOWEST_ID + 1)
        width = len(str(self._high - 1))
        self._names = np.array([b"%*d," % (width, i) for i in range(self._high)])
        self._written = lru_cache(maxsize=4096)(self._write)
        self._prefetched: dict[GeneratedPiece, list[int]] = {}

    def prefetch(self, prompts: Iterable[Prompt]) -> None:
        """Draw the pieces of the next prompts at once, as far as they are short enough for that to
        pay."""
        pieces: dict[GeneratedPiece, None] = {}
        total = 0
        for piece in chain.from_iterable(prompts):
            if isinstance(piece, GeneratedPiece) and total + piece.tokens <= MAX_PREFETCHED_TOKENS:
                total += 0 if piece in pieces else piece.tokens
                pieces[piece] = None
        keys = [f"{self._seed} {piece.key}" for piece in pieces]
        counts = [piece.tokens for piece in pieces]
        ids = (draws_of(keys, counts, self._high - LOWEST_ID) + LOWEST_ID).tolist()
        ends = zip(pieces, accumulate(counts), strict=True)
        self._prefetched = {piece: ids[end - piece.tokens : end] for piece, end in ends}

    def _ids(self, key: str, count: int) -> NDArray[np.int64]:
        return draws(f"{self._seed} {key}", count, self._high - LOWEST_ID) + LOWEST_ID

    def _write(self, key: str, count: int) -> bytes:
        """Return ids as JSON, all of one width so that numpy can lay them out: 32, 5, 480 → 32,
        5,480."""
        return self._names[self._ids(key, count)].tobytes()[:-1]

    def ids(self, prompt: Prompt) -> list[int]:
        """Return all ids of a prompt, as a server would receive them.

        Text has no ids without a tokenizer: it becomes as many ids as its length estimates, equal
        for texts that begin alike, so that they share what they would share.
        """
        return [*chain.from_iterable(map(self._piece_ids, prompt))]

    def _piece_ids(self, piece: Piece) -> Sequence[int]:
        if isinstance(piece, GeneratedPiece):
            prefetched = self._prefetched.get(piece)
            if prefetched is not None:
                return prefetched
            ids: list[int] = self._ids(piece.key, piece.tokens).tolist()
            return ids
        if isinstance(piece, TextPiece):
            return [
                self._of_letters(piece.text[at : at + 4]) for at in range(0, 4 * piece.tokens, 4)
            ]
        if self._vocabulary:
            return [i % self._vocabulary for i in piece.ids]
        return piece.ids

    def _of_letters(self, letters: str) -> int:
        digest = hashlib.blake2b(letters.encode(), digest_size=8).digest()
        return LOWEST_ID + int.from_bytes(digest, "little") % (self._high - LOWEST_ID)

    def json(self, prompt: Prompt) -> bytes:
        parts = [
            self._written(piece.key, piece.tokens)
            if isinstance(piece, GeneratedPiece)
            else b",".join([b"%d" % i for i in self._piece_ids(piece)])
            for piece in prompt
        ]
        return b"[" + b",".join(parts) + b"]"

    def pieces(self, prompt: Prompt, limit: int) -> list[int]:
        ids: list[int] = []
        for piece in prompt:
            if len(ids) < limit:
                ids += self._piece_ids(piece)
        return ids[:limit]


class WordWriter:
    """Prompts as text. `per_word` is the server's tokens for one of our words, `extra` the tokens
    of its template; both are measured before the run."""

    def __init__(self, seed: int, per_word: float = 1.0, extra: float = 0.0) -> None:
        self._seed = seed
        self._per_word = per_word
        self._extra = extra
        self._made = lru_cache(maxsize=4096)(self._words)

    def _words(self, key: str, count: int) -> str:
        return " ".join([WORDS[i] for i in draws(f"{self._seed} {key}", count, len(WORDS))])

    def text(self, prompt: Prompt) -> str:
        """Return the prompt's text; the first generated piece is shortened by the template's
        tokens."""
        parts, extra = [], self._extra
        for piece in prompt:
            if isinstance(piece, TextPiece):
                parts.append(piece.text)
            elif isinstance(piece, GeneratedPiece):
                parts.append(self._made(piece.key, self._num_words(piece.tokens - extra)))
                extra = 0.0
            else:
                key = "ids " + " ".join(map(str, piece.ids[:16]))
                parts.append(self._made(key, self._num_words(piece.tokens - extra)))
                extra = 0.0
        return " ".join(parts)

    def _num_words(self, tokens: float) -> int:
        return max(1, round(tokens / self._per_word))

    def json(self, prompt: Prompt) -> bytes:
        return msgspec.json.encode(self.text(prompt))

    def pieces(self, prompt: Prompt, limit: int) -> list[str]:
        from headway.telemetry.prefixes import words

        return words(self.text(prompt))[:limit]


def body(fields: dict[str, object], name: str, value: bytes) -> bytes:
    """Return the JSON object of `fields` with one more, already encoded, `name` field.

    >>> body({"model": "m"}, "prompt", b"[1,2]")
    b'{"model":"m","prompt":[1,2]}'
    """
    head = msgspec.json.encode(fields)
    return b"%b%b:%b}" % (
        head[:-1] + (b"," if fields else b""),
        msgspec.json.encode(name),
        value,
    )
