"""The marks of one attempt, taken as they come and read when somebody asks what they tell.

: headway 40 16 87        40 prompt tokens, 16 of them cached; the events so far show token 87
: headway 40 16 311,298   two more
"""

import re

from headway.edge.relayed import MARK, read_mark
from headway.gateway.dialects import Usage

FORM = re.compile(rb": headway \d{1,15} \d{1,15} (?:\d{1,15}(?:,\d{1,15})*)?")


class Marks:
    """Tokens that an upstream says it has shown; reading a line waits until it is asked for."""

    __slots__ = ("_lines", "_num_cached", "_num_prompt", "_tokens", "has_marks")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._tokens: list[int] = []
        self._num_prompt = self._num_cached = 0
        self.has_marks = False
        """Whether there was a mark at all."""

    def take(self, line: bytes) -> int | None:
        """How many tokens a line marks; None of another comment, ValueError of a bad mark."""
        if not line.startswith(MARK):
            return None
        if FORM.fullmatch(line) is None:
            raise ValueError("a mark has three parts: numbers of tokens, then tokens")
        self._lines.append(line)
        self.has_marks = True
        return 0 if line.endswith(b" ") else line.count(b",") + 1

    def tokens(self) -> list[int]:
        """All tokens so far."""
        for line in self._lines:
            mark = read_mark(line)
            self._tokens += mark.tokens
            self._num_prompt, self._num_cached = mark.num_prompt, mark.num_cached
        self._lines.clear()
        return self._tokens

    def usage(self) -> Usage:
        """What the last mark counts, and all tokens so far."""
        output = len(self.tokens())
        return Usage(self._num_prompt, self._num_cached, output)
