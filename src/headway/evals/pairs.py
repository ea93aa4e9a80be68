"""A against B on the same items: what was lost, its interval, a test, and whether the gate fails.

It is given per-item values of both. B is the model under test and A its reference; a loss is
positive when B is worse. The rule of the gate is `judge` and `Comparison.failed`; docs/evals.md
says it in words.
"""

import math
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
"""Kinds of loss: difference of two shares of items, bits B / A − 1, or nats a token."""
POSITIONS, PERPLEXITY = "positions", "perplexity"
"""Share of positions whose likeliest token differs; perplexity B / A − 1."""
WORSE, AS_GOOD, UNCLEAR, CANNOT_TELL = "worse", "as good", "unclear", "cannot tell"
KL_TOLERANCE, KL_TOLERANCE_NARROW = 0.02, 0.1
"""Nats a token; the second where B holds fewer than NARROW_BITS a weight and A does not."""
NARROW_BITS = 7


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
    required: bool = False


class Measure(msgspec.Struct, kw_only=True):
    """A row of the comparison. `low` … `high` holds the loss with 95% confidence.

    `lost` items only A got right, `gained` only B; `p` is exact McNemar's, two-sided, corrected
    by Holm over the skills. `floor` is the loss that B surely exceeds, at the gate's confidence,
    and `ceiling` the loss that it surely stays below. `verdict` is worse, as good, unclear, or
    cannot tell: too few items to see the tolerated loss. One `required` must not be the last.
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
    required: bool = False


class Comparison(msgspec.Struct, kw_only=True):
    """All measures, what was not alike, and whether the gate lets B pass."""

    first: str
    second: str
    measures: list[Measure]
    differences: list[str]
    allow_unclear: bool = False

    @property
    def worse(self) -> list[Measure]:
        """What the gate fails for."""
        return [measure for measure in self.measures if measure.verdict == WORSE]

    @property
    def blind(self) -> bool:
        """Whether no required measure has the power to see the tolerated loss."""
        return all(each.verdict == CANNOT_TELL for each in self.measures if each.required)

    @property
    def failed(self) -> bool:
        """The gate's verdict."""
        return bool(self.worse) or (self.blind and not self.allow_unclear)


def skill_pairs(first: SkillsReport, second: SkillsReport) -> list[Paired]:
    """All skills together, then each, over the questions that both were asked."""
    both = asked_of_both(first, second)
    if not both:
        raise UsageError(
            "The two runs have no question in common.",
            "Give both the same --test-seed, --skills and --levels.",
        )
    pairs = [right_pairs("skills", both)]
    each = by_name(both)
    alone = len(each) == 1 and not next(iter(each)).startswith("lookup at")
    return pairs if alone else [*pairs, *(right_pairs(f"skill {n}", b) for n, b in each.items())]


def task_pairs(first: SkillsReport, second: SkillsReport) -> list[Paired]:
    """Each task, over the questions that both were asked."""
    found = by_name(asked_of_both(first, second))
    return [right_pairs(f"task {name}", both) for name, both in found.items()]


def asked_of_both(first: SkillsReport, second: SkillsReport) -> list[tuple[Item, Item]]:
    """The questions that both were asked, in B's order."""
    asked = {item.key: item for item in first.items}
    return [(asked[item.key], item) for item in second.items if item.key in asked]


def by_name(both: Sequence[tuple[Item, Item]]) -> dict[str, list[tuple[Item, Item]]]:
    """The pairs of each skill or task."""
    found: dict[str, list[tuple[Item, Item]]] = {}
    for pair in both:
        found.setdefault(pair[1].skill, []).append(pair)
    return found


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
    good when the loss stays below the tolerance with confidence 1 − ALPHA, or McNemar calls it
    better; n pairs that are all alike still allow a loss of 1 − ALPHA^(1/n): 3 points for 100.
    Else it is unclear where twice the tolerance would be seen, and where not, it cannot tell.
    """
    level = ALPHA / num_measures
    draws = paired_bootstrap(paired.loss, paired.weight, paired.strata)
    weight = len(paired.loss) if paired.weight is None else paired.weight.sum()
    loss = float(paired.loss.sum() / weight)
    if paired.kind == PERPLEXITY:
        draws, loss = np.expm1(draws), math.expm1(loss)
    low, high = interval(draws)
    floor, ceiling = (float(q) for q in np.quantile(draws, [level, 1 - ALPHA]))
    worse, seen = floor > tolerance, loss - floor <= tolerance
    possible, better, lost, gained, p = True, False, None, None, None
    if paired.kind == POINTS:
        ceiling = max(ceiling, 1 - ALPHA ** (1 / len(paired.loss)))
        lost, gained = int((paired.loss > 0).sum()), int((paired.loss < 0).sum())
        p = mcnemar(lost, gained)
        worse = worse and mcnemar_worse(lost, gained) <= level
        better = mcnemar_worse(gained, lost) <= level
        possible = (paired.first or 0.0) >= min(2 * tolerance, 0.5)
        seen = seen and mcnemar_worse(int(2 * tolerance * len(paired.loss)), 0) <= level
    verdict = WORSE if worse else CANNOT_TELL
    if better or (not worse and possible and (seen or ceiling <= tolerance)):
        verdict = AS_GOOD if better or ceiling <= tolerance else UNCLEAR
    return Measure(
        name=paired.name,
        kind=paired.kind,
        items=paired.items,
        first=paired.first,
        second=paired.second,
        loss=loss,
        low=low,
        high=high,
        lost=lost,
        gained=gained,
        p=p,
        tolerance=tolerance,
        floor=floor,
        ceiling=ceiling,
        verdict=verdict,
        required=paired.required,
    )


def tolerances(share: float, kl: float) -> dict[str, float]:
    """By kind of loss, from the share of items or bits and the nats a token that may be lost.

    A text that A wrote has e^KL times the perplexity by B. Two distributions differ in √(KL / 2)
    of their mass at most (Pinsker), and so many points of the likeliest tokens may differ: 0.02
    nats are 2.0% and 10 points, 0.1 nats are 10.5% and 22 points.
    """
    return {
        POINTS: share,
        RELATIVE: share,
        NATS: kl,
        POSITIONS: math.sqrt(kl / 2),
        PERPLEXITY: math.expm1(kl),
    }


def usual_kl_tolerance(first_bits: float | None, second_bits: float | None) -> float:
    """Nats a token, from the bits a weight of A and of B; None where they are not known."""
    narrow = second_bits is not None and second_bits < NARROW_BITS
    alike = first_bits is not None and first_bits < NARROW_BITS
    return KL_TOLERANCE_NARROW if narrow and not alike else KL_TOLERANCE


def compare(
    names: tuple[str, str],
    pairs: Sequence[Paired],
    tolerances: dict[str, float],
    differences: Sequence[str] = (),
    allow_unclear: bool = False,
) -> Comparison:
    """Judge every measure; `tolerances` are by kind of loss."""
    measures = [judge(paired, tolerances[paired.kind], len(pairs)) for paired in pairs]
    skills = [measure for measure in measures if measure.name.startswith("skill ")]
    for measure, p in zip(skills, holm([measure.p or 0.0 for measure in skills]), strict=True):
        measure.p = p
    return Comparison(
        first=names[0],
        second=names[1],
        measures=measures,
        differences=list(differences),
        allow_unclear=allow_unclear,
    )
