"""Incremental detokenizer of one sequence: whole characters, stop strings held back.

`push` takes token ids step by step and returns the text that may be shown. The pieces add up to the
decoded text up to the stop string; no piece has half a UTF-8 character, and no part of a stop
string is ever returned. Example, stop "END":

    push b"the E"    → "the "       "E" may begin the stop string
    push b"gg EN"    → "Egg "       it did not; "EN" may
    push b"D."       → ""           stopped
"""

import codecs
from collections.abc import Callable

from headway.frontend.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6


class TextStream:
    """Incremental text of one sequence; see the example of the module."""

    __slots__ = (
        "_decode",
        "_held",
        "_include_stop",
        "_longest",
        "_num_free",
        "_skip",
        "_stops",
        "_tail",
        "_tokenizer",
        "_waiting",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        *,
        stop: list[str],
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stop
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._skip = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._held = ""
        self._num_free = 0
        """Number of characters at the start of `_held` within which no stop string may end."""
        self.stopped: str | None = None
        """Stop string that ended the text, or None."""
        self._tail: list[int] = []
        self._waiting: list[int] = []
        self._decode: Callable[[bytes, bool], str] | None = None
        if tokenizer.pieces is not None:
            self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        else:
            self._tail = [t for t in prompt_token_ids[-CONTEXT_TOKENS:] if t not in self._skip]

    def push(self, token_ids: list[int], last: bool = False, *, may_stop: bool = True) -> str:
        """Return the text to show after `token_ids`; with `last` also all held text.

        Without `may_stop` no stop string may end within the text of these tokens (it may begin
        there and end later).
        """
        if self.stopped is not None:
            return ""
        text = self._text_of(token_ids, last)
        if not self._stops:
            return text
        self._held += text
        if not may_stop:
            self._num_free = len(self._held)
        return self._release(last)

    def _text_of(self, token_ids: list[int], last: bool) -> str:
        if self._decode is None:
            return self._by_prefix(token_ids, last)
        pieces, skip = self._tokenizer.pieces, self._skip
        assert pieces is not None
        if len(token_ids) == 1:
            token_id = token_ids[0]
            data = b"" if token_id in skip else pieces.get(token_id, b"")
        else:
            data = b"".join(pieces.get(t, b"") for t in token_ids if t not in skip)
        return self._decode(data, last)

    def _by_prefix(self, token_ids: list[int], last: bool) -> str:
        """Return the text that the waiting tokens add; slow, for unknown decoders.

        `_tail` has a few shown tokens for context, `_waiting` those that are not shown yet because
        the text ends in half a character.
        """
        decode, skip = self._tokenizer.decode, self._skip
        before = decode(self._tail, skip_special_tokens=False)
        self._waiting = self._waiting + [t for t in token_ids if t not in skip]
        after = decode(self._tail + self._waiting, skip_special_tokens=False)
        if after.endswith(REPLACEMENT) and not last:
            return ""
        self._tail = (self._tail + self._waiting)[-CONTEXT_TOKENS:]
        self._waiting = []
        return after[len(before) :]

    def _release(self, last: bool) -> str:
        """Return the text up to the stop string that ends first, else all that cannot begin one.

        The result does not depend on how the text was cut into tokens: "abcde" with the stops "bcd"
        and "abcde" stops at "bcd", in one token or in five.
        """
        held, free = self._held, self._num_free
        stops = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := held.find(stop, max(0, free + 1 - len(stop)))) >= 0
        ]
        if stops:
            end, at = min(stops)
            self.stopped = held[at:end]
            self._held = ""
            return held[:end] if self._include_stop else held[:at]
        keep = 0 if last else self._length_of_possible_stop(held)
        shown = len(held) - keep
        self._held = held[shown:]
        self._num_free = max(0, free - shown)
        return held[:shown]

    def _length_of_possible_stop(self, held: str) -> int:
        """Return the length of the longest end of `held` that begins a stop: "the EN" → 2."""
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            end = held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
