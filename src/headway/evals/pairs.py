"""A against B on the same items: what was lost, its interval, a test, and whether the gate fails.

It is given per-item values of both. B is the model under test and A its reference; a loss is
positive when B is worse. The rule of the gate is `judge`, and docs/evals.md says it in words.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headway.core.errors import UsageError
from headway.evals.questions import Item, SkillsReport
from headway.evals.statistics import (
    Values,
    holm,
    interval,
    mcnemar,
    mcnemar_worse,
    paired_bootstrap,
)

ALPHA = 0.05
"""How often the gate may fail a model that is no worse than the tolerance."""
POINTS, RELATIVE, NATS = "points", "relative", "nats"
"""Kinds of loss: difference of two shares, B / A − 1, or a divergence in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One measure of both, item by item.

    `loss` over `weight` sums to the measure's loss. Shares: loss is right in A minus right in B, 1,
    0 or −1, and weight 1. Bits per byte: loss is bits of B minus bits of A, weight the bits of A,
    of blocks of neighbouring items.
    """

    name: str
    kind: str
    first: float | None
    second: float | None
    items: int
    loss: Values
    weight: Values | None = None
    strata: Sequence[Hashable] | None = None


class Measure(msgspec.Struct, kw_only=True):
    """A row of the comparison. `low` … `high` holds the loss with 95% confidence.

    `lost` items only A got right, `gained` only B; `p` is exact McNemar's, two-sided, corrected
    by Holm over the skills. `floor` is the loss that B surely exceeds, at the gate's confidence,
    and `ceiling` the loss that it surely stays below. `verdict` is worse, as good or unclear.
    """

    name: str
    kind: str
    items: int
    first: float | None
    second: float | None
    loss: float
    low: float
    high: float
    lost: int | None = None
    gained: int | None = None
    p: float | None = None
    tolerance: float
    floor: float
    ceiling: float
    verdict: str


class Comparison(msgspec.Struct, kw_only=True):
    """All measures, what was not alike, and whether the gate lets B pass."""

    first: str
    second: str
    measures: list[Measure]
    differences: list[str]

    @property
    def worse(self) -> list[Measure]:
        """What the gate fails for."""
        return [measure for measure in self.measures if measure.verdict == "worse"]


def skill_pairs(first: SkillsReport, second: SkillsReport) -> list[Paired]:
    """All skills together, then each, over the questions that both were asked."""
    asked = {item.key: item for item in first.items}
    both = [(asked[item.key], item) for item in second.items if item.key in asked]
    if not both:
        raise UsageError(
            "The two runs have no question in common.",
            "Give both the same --test-seed, --skills and --levels.",
        )
    skills = list(dict.fromkeys(b.skill for _, b in both))
    pairs = [right_pairs("skills", both)]
    for skill in skills if len(skills) > 1 else ():
        pairs.append(right_pairs(f"skill {skill}", [(a, b) for a, b in both if b.skill == skill]))
    return pairs


def right_pairs(name: str, both: Sequence[tuple[Item, Item]]) -> Paired:
    """Right or not, drawn again within each skill and level."""
    a, b = (np.array([pair[i].right for pair in both], dtype=float) for i in (0, 1))
    return Paired(
        name=name,
        kind=POINTS,
        first=float(a.mean()),
        second=float(b.mean()),
        items=len(both),
        loss=a - b,
        strata=[(item.skill, item.level) for _, item in both],
    )


def judge(paired: Paired, tolerance: float, num_measures: int) -> Measure:
    """The gate's rule for one of `num_measures`.

    B is worse when the loss exceeds the tolerance with confidence 1 − ALPHA / `num_measures`,
    and, where items are right or wrong, exact McNemar denies chance at the same level. It is as
    good when the loss stays below the tolerance with confidence 1 − ALPHA, else it is unclear;
    n pairs that are all alike still allow a loss of 1 − ALPHA^(1/n): 3 points for 100.
    """
    level = ALPHA / num_measures
    draws = paired_bootstrap(paired.loss, paired.weight, paired.strata)
    weight = len(paired.loss) if paired.weight is None else paired.weight.sum()
    low, high = interval(draws)
    floor, ceiling = (float(q) for q in np.quantile(draws, [level, 1 - ALPHA]))
    worse = floor > tolerance
    lost = gained = p = None
    if paired.kind == POINTS:
        ceiling = max(ceiling, 1 - ALPHA ** (1 / len(paired.loss)))
        lost, gained = int((paired.loss > 0).sum()), int((paired.loss < 0).sum())
        p = mcnemar(lost, gained)
        worse = worse and mcnemar_worse(lost, gained) <= level
    return Measure(
        name=paired.name,
        kind=paired.kind,
        items=paired.items,
        first=paired.first,
        second=paired.second,
        loss=float(paired.loss.sum() / weight),
        low=low,
        high=high,
        lost=lost,
        gained=gained,
        p=p,
        tolerance=tolerance,
        floor=floor,
        ceiling=ceiling,
        verdict="worse" if worse else "as good" if ceiling <= tolerance else "unclear",
    )


def compare(
    names: tuple[str, str],
    pairs: Sequence[Paired],
    tolerances: dict[str, float],
    differences: Sequence[str] = (),
) -> Comparison:
    """Judge every measure; `tolerances` are by kind of loss."""
    measures = [judge(paired, tolerances[paired.kind], len(pairs)) for paired in pairs]
    skills = [measure for measure in measures if measure.name.startswith("skill ")]
    for measure, p in zip(skills, holm([measure.p or 0.0 for measure in skills]), strict=True):
        measure.p = p
    return Comparison(
        first=names[0], second=names[1], measures=measures, differences=list(differences)
    )
