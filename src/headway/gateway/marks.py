"""Marks of one attempt: comments of a Headway server that name the tokens shown so far.

: headway 40 16 87        40 prompt tokens, 16 of them cached; the events so far show token 87
: headway 40 16 311,298   two more
"""

import re

from headway.edge.relayed import MARK, read_mark
from headway.gateway.dialects import UpstreamUsage

MARK_PATTERN = re.compile(rb": headway \d{1,15} \d{1,15} (?:\d{1,15}(?:,\d{1,15})*)?")


class TokenMarks:
    """Tokens that an upstream has shown by its marks; lines are parsed when first needed."""

    __slots__ = ("_lines", "_num_cached", "_num_prompt", "_tokens", "has_marks")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._tokens: list[int] = []
        self._num_prompt = self._num_cached = 0
        self.has_marks = False
        """Whether at least one mark arrived."""

    def take(self, line: bytes) -> int | None:
        """Add a mark and return its number of tokens; None for another comment, else ValueError."""
        if not line.startswith(MARK):
            return None
        if MARK_PATTERN.fullmatch(line) is None:
            raise ValueError("a mark has three parts: numbers of tokens, then tokens")
        self._lines.append(line)
        self.has_marks = True
        return 0 if line.endswith(b" ") else line.count(b",") + 1

    def tokens(self) -> list[int]:
        """Return all tokens so far."""
        for line in self._lines:
            mark = read_mark(line)
            self._tokens += mark.tokens
            self._num_prompt, self._num_cached = mark.num_prompt, mark.num_cached
        self._lines.clear()
        return self._tokens

    def usage(self) -> UpstreamUsage:
        """Return the counts of the last mark, and the number of tokens so far."""
        output = len(self.tokens())
        return UpstreamUsage(self._num_prompt, self._num_cached, output)
