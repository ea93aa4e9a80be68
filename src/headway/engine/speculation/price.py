"""What a drafter takes: seconds for being asked, each pass and each row, learned from each step.

    3 and 1 guesses of two sequences: three passes of a drafting model, four rows
                                      one pass of Medusa heads, four rows

The first pass of a drafting model computes all that came since the last, and whoever is asked has
work to do whatever is guessed, so asking has a price of its own: with headway-draft 0.45 ms, and
each pass 0.1 ms. Least squares over what was seen, older steps fading, none below 0, beside a
prior: its share of the model's own step by their parameters. A step in which it first computes a
long prompt says little of that and is clipped.
"""

from headway.engine.cost import StepCost, Work
from headway.engine.speculation.controller import Drafting

FADE = 0.98
CLIP = 2.0
"""A step that took longer than this many times what was expected counts as so long."""
ROW_SHARE = 0.1
"""Of a pass, what each row adds, before any was seen."""
PRIOR = 2.0
"""The prior of each of the three counts as so many steps that tell of it alone."""
OVERHEAD_S = 1e-4
"""Of being asked, whatever the size: calls, tensors, the draw."""
SWEEPS = 6
"""Rounds of coordinate descent after each step; it begins where the last one ended."""


class DraftPrice:
    """`share` is what a pass reads as a share of the model's step; `at_once`: it drafts all."""

    def __init__(self, cost: StepCost, share: float, *, at_once: bool = False) -> None:
        self._cost, self._share, self._at_once = cost, share, at_once
        self._parts: list[float] = []
        """Of asking, of a pass, of a row; empty until somebody wants to know."""
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._seconds = [0.0] * 3

    @property
    def drafting(self) -> Drafting:
        """Seconds of being asked, of a pass and of a row."""
        if not self._parts:
            self._begin()
        ask_s, pass_s, row_s = self._parts
        return Drafting(pass_s, row_s, self._at_once, ask_s)

    def _begin(self) -> None:
        """The prior. Heads have one pass whenever they are asked: asking is no part of its own."""
        one = self._cost.seconds(Work(1, 1, 1, 1)) * self._share
        self._parts = [OVERHEAD_S, (1 - ROW_SHARE) * one, ROW_SHARE * one]
        if self._at_once:
            self._parts[:2] = 0.0, OVERHEAD_S + self._parts[1]
        for at, part in enumerate(self._parts):
            self._squares[at][at] = PRIOR
            self._seconds[at] = PRIOR * part

    def observe(self, depth: int, rows: int, seconds: float) -> None:
        """A step in which `rows` guesses were made, of a sequence at most `depth`."""
        if not rows:
            return
        drafting = self.drafting
        expected_s = drafting.seconds(depth) + drafting.row_s * rows
        seconds = min(seconds, CLIP * expected_s)
        counts = (0.0, 1.0, rows) if self._at_once else (1.0, depth, rows)
        for at, count in enumerate(counts):
            self._seconds[at] = FADE * self._seconds[at] + count * seconds
            row = self._squares[at]
            for beside, other in enumerate(counts):
                row[beside] = FADE * row[beside] + count * other
        parts = self._parts
        for _ in range(SWEEPS):
            for at, row in enumerate(self._squares):
                if row[at] > 0:
                    left = self._seconds[at] - sum([n * part for n, part in zip(row, parts)])
                    parts[at] = max(parts[at] + left / row[at], 0.0)
