"""What a drafter takes: seconds for each pass and for each row, learned from each step.

    3 and 1 guesses of two sequences: three passes of a drafting model, four rows
                                      one pass of Medusa heads, four rows

Least squares over what was seen, older steps fading, beside a prior: its share of the model's own
step by their parameters. A step in which it first computes a long prompt says little of that and is
clipped.
"""

from headway.engine.cost import StepCost, Work
from headway.engine.speculation.controller import Drafting

FADE = 0.97
CLIP = 2.0
"""A step that took longer than this many times what was expected counts as so long."""
ROW_SHARE = 0.1
"""Of a pass, what each row adds, before any was seen."""
PRIOR = 4.0
"""The prior counts as so many steps of 4 guesses, and as many of 16."""
OVERHEAD_S = 1e-4
"""Of a pass, whatever its size: calls, tensors, the draw."""


class DraftPrice:
    """`share` is what a pass reads as a share of the model's step; `at_once`: it drafts all."""

    def __init__(self, cost: StepCost, share: float, *, at_once: bool = False) -> None:
        self._cost, self._share, self._at_once = cost, share, at_once
        self._sums: list[float] | None = None
        self._drafting: Drafting | None = None

    @property
    def drafting(self) -> Drafting:
        """Seconds of a pass and of a row."""
        if self._drafting is None:
            self._drafting = self._solve()
        return self._drafting

    def observe(self, depth: int, rows: int, seconds: float) -> None:
        """A step in which `rows` guesses were made, of a sequence at most `depth`."""
        if not rows:
            return
        passes = self.drafting.passes(depth)
        expected = self.drafting.pass_s * passes + self.drafting.row_s * rows
        seconds = min(seconds, CLIP * expected)
        pp, pr, rr, ps, rs = (FADE * each for each in self._prior_sums())
        self._sums = [
            pp + passes * passes,
            pr + passes * rows,
            rr + rows * rows,
            ps + passes * seconds,
            rs + rows * seconds,
        ]
        self._drafting = None

    def _prior_sums(self) -> list[float]:
        """The sums so far; those of the prior before any."""
        if self._sums is None:
            one = self._cost.seconds(Work(1, 1, 1, 1)) * self._share + OVERHEAD_S
            row_s, pass_s = ROW_SHARE * one, (1 - ROW_SHARE) * one
            passes = 1 if self._at_once else 4
            cases = ((passes, 4), (passes, 16))
            pairs = [(p, r, p * pass_s + r * row_s) for p, r in cases]
            self._sums = [
                PRIOR * sum(p * p for p, _, _ in pairs),
                PRIOR * sum(p * r for p, r, _ in pairs),
                PRIOR * sum(r * r for _, r, _ in pairs),
                PRIOR * sum(p * s for p, _, s in pairs),
                PRIOR * sum(r * s for _, r, s in pairs),
            ]
        return self._sums

    def _solve(self) -> Drafting:
        """The least squares of seconds = passes · pass_s + rows · row_s, neither below 0."""
        pp, pr, rr, ps, rs = self._prior_sums()
        determinant = pp * rr - pr * pr
        if determinant > 1e-9 * pp * rr:
            pass_s = (ps * rr - rs * pr) / determinant
            row_s = (rs * pp - ps * pr) / determinant
            if pass_s >= 0 and row_s >= 0:
                return Drafting(pass_s, row_s, self._at_once)
        return Drafting(max(ps / pp, 0.0), 0.0, self._at_once)
