"""Limit of the digits of a number in generated JSON: a schema bounds its value, not its length.

With {"minimum": 0.1, "maximum": 0.25} the value 0.1999… may have any number of digits, and a
sampled model may write them until the answer is cut off. So a mask allows at most `MAX_DIGITS`
consecutive digits where the number may end: any 64-bit integer, and more than a double can hold.

Where a number may end, "," or "}" or "]" or the end of the answer is allowed, and a quote is not;
within a string a quote is. A number that must have more digits, such as a constant, gets them.
"""

from collections.abc import Sequence as Listing

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from headway.core.grammar import Grammar

MAX_DIGITS = 20
DIGITS = b"0123456789"
ENDS, QUOTE = b",}]", b'"'

Words = npt.NDArray[np.int32]


def has_numbers(grammar: Grammar) -> bool:
    """Return whether answers are JSON by a schema; other grammars are followed to the letter."""
    if grammar.kind == "structural":
        return "%json" in grammar.text
    return grammar.kind in ("json", "json_object")


class DigitLimit:
    """Tokens of one vocabulary that continue a number, and tokens that end one."""

    def __init__(self, vocabulary: LLTokenizer, num_words: int) -> None:
        texts = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
        self.num_words = num_words
        self._leading = np.array([len(text) - len(text.lstrip(DIGITS)) for text in texts])
        self._longest = int(self._leading.max(initial=0))
        self._trailing = {
            token: len(text) - len(text.rstrip(DIGITS))
            for token, text in enumerate(texts)
            if text[-1:].isdigit()
        }
        self._whole = {token for token in self._trailing if texts[token].isdigit()}
        firsts = np.array([text[:1] for text in texts])
        ends = np.isin(firsts, [bytes([byte]) for byte in ENDS])
        ends[vocabulary.eos_tokens] = True
        self._ends, self._quotes = self._bits(ends), self._bits(firsts == QUOTE)
        self._beyond: dict[int, Words] = {}

    def _bits(self, chosen: npt.NDArray[np.bool_]) -> Words:
        """Return a mask of the chosen tokens."""
        words = np.zeros(self.num_words, np.int32)
        packed = np.packbits(chosen, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return words

    def num_digits(self, tokens: Listing[int]) -> int:
        """Count the digits at the end of the text: "0.1", "23" → 3; inexact beyond the limit."""
        count = 0
        for token in reversed(tokens):
            count += self._trailing.get(token, 0)
            if token not in self._whole or count > MAX_DIGITS:
                break
        return count

    def apply(self, words: Words, tokens: Listing[int]) -> None:
        """Remove from a mask, in place, tokens that would give the number too many digits."""
        num_free = max(0, MAX_DIGITS - self.num_digits(tokens))
        if (
            num_free >= self._longest
            or not (words & self._ends).any()
            or (words & self._quotes).any()
        ):
            return
        if num_free not in self._beyond:
            self._beyond[num_free] = self._bits(self._leading > num_free)
        words &= ~self._beyond[num_free]
