"""A claim of the literature, what was measured of it, and the verdict that follows.

A verdict is a rule of the headline figure and what was promised, so that nobody decides by taste:

    at least 2     holds from 1.8 on (a tenth is forgiven), holds in part where the whole interval
                   lies beyond what no effect would give (1.0), else it does not hold here
    between 2, 4   holds from 1.8 to 4.4, holds in part on the same side of no effect
    exactly 54     holds within a twentieth, else it does not hold here

A claim of several parts ("75% less latency, 53% less cost") has a promise for each figure. It
holds only where every part was measured and holds, and in part where its headline does.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from headway.evals.statistics import wilson
from headway.measure.plot import Plot

if TYPE_CHECKING:
    from literature.subject import Subject

Verdict = Literal["holds", "holds in part", "does not hold here"]
Needs = Literal["nothing", "server", "folder"]
HOLDS: Verdict = "holds"
IN_PART: Verdict = "holds in part"
NOT_HERE: Verdict = "does not hold here"
FORGIVEN, EXACT = 0.1, 0.05
DRAWS = 2000


class NotThereError(Exception):
    """What a claim is about is not there: this model has no such heads, this server tells no count.

    The claim is listed with this reason in place of a verdict.
    """


class Figure(msgspec.Struct, kw_only=True):
    """One number that was measured; `low` … `high` is its 95% interval, None for exact ones."""

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    promise: "Promise | None" = None
    """Of a part of the claim beside its headline."""

    def __post_init__(self) -> None:
        self.value = float(self.value)  # of numpy's numbers ours: they go into JSON

    def __str__(self) -> str:
        """2.31x (2.20 … 2.44)"""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" ({shown(self.low, self.unit)} … {shown(self.high, self.unit)})"
        return f"{shown(self.value, self.unit)}{self.unit}{interval}"


def shown(value: float, unit: str = "") -> str:
    """Three digits: 0.0123, 2.31, 53.7, 1,235."""
    if unit == "%":
        return f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Promise(msgspec.Struct, kw_only=True, frozen=True):
    """What the headline figure should be: from `low` to `high`, None: no bound above.

    `none` is what it is where there is no effect. `exact` wants the value within a twentieth.
    """

    low: float
    high: float | None = None
    none: float = 1.0
    exact: bool = False

    def verdict(self, figure: Figure) -> Verdict:
        """By the rule at the top of this file."""
        if self.exact:
            return HOLDS if abs(figure.value - self.low) <= EXACT * abs(self.low) else NOT_HERE
        above = figure.value >= self.low * (1 - FORGIVEN)
        if above and (self.high is None or figure.value <= self.high * (1 + FORGIVEN)):
            return HOLDS
        least = figure.value if figure.low is None else figure.low
        return IN_PART if least > self.none else NOT_HERE


class Finding(msgspec.Struct, kw_only=True):
    """What came of a claim: figures, the first of which is the headline, verdict and reason."""

    figures: list[Figure]
    promise: Promise
    why: str
    verdict: Verdict = NOT_HERE
    picture: Plot | None = None
    """None where a number says it all."""
    seconds: float = 0.0
    unmeasured: list[str] = []
    """Parts of the claim that this server or model cannot show."""

    def __post_init__(self) -> None:
        self.verdict = self.promise.verdict(self.figures[0])
        parts = [each.promise.verdict(each) for each in self.figures if each.promise is not None]
        if self.verdict == HOLDS and (self.unmeasured or any(part != HOLDS for part in parts)):
            self.verdict = IN_PART


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """One row: what is claimed, by whom, and the function that measures it.

    `needs` says who must be there: nobody for arithmetic and simulation, a server that is asked
    over HTTP, or a folder whose engines are set up in several ways.
    """

    key: str
    family: str
    says: str
    source: str
    measure: Callable[["Subject"], Finding]
    needs: Needs = "nothing"
    how: str = ""
    """How it is measured here, in a sentence."""


# ── intervals ───────────────────────────────────────────────────────────────────────────────


def median_of(name: str, values: Sequence[float], unit: str = "") -> Figure:
    """The median with a bootstrap interval over the repeats."""
    return bootstrap(name, unit, [values], lambda parts: float(np.median(parts[0])))


def ratio_of(name: str, top: Sequence[float], bottom: Sequence[float], unit: str = "x") -> Figure:
    """Median of `top` over median of `bottom`; each is drawn anew on its own."""
    return bootstrap(name, unit, [top, bottom], lambda p: float(np.median(p[0]) / np.median(p[1])))


def share_of(name: str, met: int, count: int) -> Figure:
    """Percent of `count` that met something, with Wilson's interval."""
    low, high = wilson(met, count)
    share = met / count if count else 0.0
    return Figure(name=name, value=100 * share, unit="%", low=100 * low, high=100 * high)


def bootstrap(
    name: str,
    unit: str,
    samples: Sequence[Sequence[float]],
    figure: Callable[[Sequence[Any]], float],
    draws: int = DRAWS,
) -> Figure:
    """`figure` of the samples, and its 95% over `draws` drawn from them with replacement.

    Raises ValueError for a sample without values: what was not measured has no figure.
    """
    arrays = [np.asarray(values, dtype=float) for values in samples]
    if not all(len(values) for values in arrays):
        raise ValueError(f"{name}: a sample is empty")
    random = np.random.default_rng(0)
    drawn = [
        figure([values[random.integers(0, len(values), len(values))] for values in arrays])
        for _ in range(draws)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Figure(name=name, value=figure(arrays), unit=unit, low=float(low), high=float(high))
