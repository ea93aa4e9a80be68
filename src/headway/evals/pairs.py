"""Compare models A and B on the same items: loss, its interval, a significance test, and the gate.

B is the model under test and A its reference; a loss is positive when B is worse. The gate's rule
is `judge` and `EvalComparison.failed`; docs/evals.md explains it.
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
"""Probability that the gate fails a model that is no worse than the tolerance."""
POINTS, RELATIVE, NATS = "points", "relative", "nats"
"""Kinds of loss: difference of two shares of items, bits B / A − 1, or nats per token."""
POSITIONS, PERPLEXITY = "positions", "perplexity"
"""Share of positions with a different most likely token; perplexity B / A − 1."""
WORSE, AS_GOOD, UNCLEAR, CANNOT_TELL = "worse", "as good", "unclear", "cannot tell"
KL_TOLERANCE, KL_TOLERANCE_NARROW = 0.02, 0.1
"""Nats per token; the second applies where B has under NARROW_BITS bits per weight and A does
not."""
NARROW_BITS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One measure of both models, item by item.

    The measure's loss is the sum of `loss` over the sum of `weight`. For shares, an item's loss is
    right in A minus right in B (1, 0 or −1) and its weight is 1. For bits per byte, the items are
    blocks of consecutive passages, loss is bits of B minus bits of A, and weight is bits of A.
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
    """A row of the comparison. [`low`, `high`] is the 95% interval of the loss.

    `only_first` counts items that only A got right, `only_second` those that only B got right; `p`
    is the exact two-sided McNemar test, Holm-corrected over the skills. At the gate's confidence,
    the true loss is above `floor` and below `ceiling`. `verdict` is worse, as good, unclear, or
    cannot tell (too few items to detect the tolerated loss). If every `required` measure says
    cannot tell, the gate fails.
    """

    name: str
    kind: str
    items: int
    first: float | None
    second: float | None
    loss: float
    low: float
    high: float
    only_first: int | None = msgspec.field(default=None, name="lost")
    only_second: int | None = msgspec.field(default=None, name="gained")
    p: float | None = None
    tolerance: float
    floor: float
    ceiling: float
    verdict: str
    required: bool = False


class EvalComparison(msgspec.Struct, kw_only=True):
    """All measures, the settings in which the two runs differ, and whether B passes the gate."""

    first: str
    second: str
    measures: list[Measure]
    differences: list[str]
    allow_unclear: bool = False

    @property
    def worse(self) -> list[Measure]:
        """Measures that make the gate fail."""
        return [measure for measure in self.measures if measure.verdict == WORSE]

    @property
    def blind(self) -> bool:
        """Whether no required measure has enough items to detect the tolerated loss."""
        return all(each.verdict == CANNOT_TELL for each in self.measures if each.required)

    @property
    def failed(self) -> bool:
        """Whether the gate fails."""
        return bool(self.worse) or (self.blind and not self.allow_unclear)


def skill_pairs(first: SkillsReport, second: SkillsReport) -> list[Paired]:
    """Return a measure for all skills together, then one per skill, over the questions of both
    runs."""
    both = common_items(first, second)
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
    """Return a measure per task, over the questions of both runs."""
    pairs = by_name(common_items(first, second))
    return [right_pairs(f"task {name}", both) for name, both in pairs.items()]


def common_items(first: SkillsReport, second: SkillsReport) -> list[tuple[Item, Item]]:
    """Return (item of A, item of B) for each question that both runs contain, in B's order."""
    by_key = {item.key: item for item in first.items}
    return [(by_key[item.key], item) for item in second.items if item.key in by_key]


def by_name(both: Sequence[tuple[Item, Item]]) -> dict[str, list[tuple[Item, Item]]]:
    """Group the pairs by skill or task."""
    groups: dict[str, list[tuple[Item, Item]]] = {}
    for pair in both:
        groups.setdefault(pair[1].skill, []).append(pair)
    return groups


def right_pairs(name: str, both: Sequence[tuple[Item, Item]]) -> Paired:
    """Return the measure of right answers; the bootstrap resamples within each skill and level."""
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
    """Apply the gate's rule to one of `num_measures` measures.

    B is worse when the loss exceeds the tolerance with confidence 1 − ALPHA / `num_measures` and,
    for right-or-wrong items, exact McNemar rejects chance at the same level. B is as good when the
    loss is below the tolerance with confidence 1 − ALPHA, or McNemar finds B better. If all n pairs
    are equal, a loss of 1 − ALPHA^(1/n) is still possible: 3 points for n = 100. Otherwise the
    verdict is unclear if a loss of twice the tolerance would be detected, else cannot tell.
    """
    level = ALPHA / num_measures
    draws = paired_bootstrap(paired.loss, paired.weight, paired.strata)
    weight = len(paired.loss) if paired.weight is None else paired.weight.sum()
    loss = float(paired.loss.sum() / weight)
    if paired.kind == PERPLEXITY:
        draws, loss = np.expm1(draws), math.expm1(loss)
    low, high = interval(draws)
    floor, ceiling = (float(q) for q in np.quantile(draws, [level, 1 - ALPHA]))
    worse, detectable = floor > tolerance, loss - floor <= tolerance
    possible, better, only_first, only_second, p = True, False, None, None, None
    if paired.kind == POINTS:
        ceiling = max(ceiling, 1 - ALPHA ** (1 / len(paired.loss)))
        only_first, only_second = int((paired.loss > 0).sum()), int((paired.loss < 0).sum())
        p = mcnemar(only_first, only_second)
        worse = worse and mcnemar_worse(only_first, only_second) <= level
        better = mcnemar_worse(only_second, only_first) <= level
        possible = (paired.first or 0.0) >= min(2 * tolerance, 0.5)
        detectable = detectable and mcnemar_worse(int(2 * tolerance * len(paired.loss)), 0) <= level
    verdict = WORSE if worse else CANNOT_TELL
    if better or (not worse and possible and (detectable or ceiling <= tolerance)):
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
        only_first=only_first,
        only_second=only_second,
        p=p,
        tolerance=tolerance,
        floor=floor,
        ceiling=ceiling,
        verdict=verdict,
        required=paired.required,
    )


def tolerances(share: float, kl: float) -> dict[str, float]:
    """Return the tolerance by kind of loss.

    `share` is the tolerated loss as a fraction of items or bits, `kl` the one in nats per token. A
    text sampled from A has e^KL times the perplexity under B. Two distributions differ in at most
    √(KL / 2) of their mass (Pinsker), so at most that share of most likely tokens may differ: 0.02
    nats give 2.0% of perplexity and 10 points, 0.1 nats 10.5% and 22 points.
    """
    return {
        POINTS: share,
        RELATIVE: share,
        NATS: kl,
        POSITIONS: math.sqrt(kl / 2),
        PERPLEXITY: math.expm1(kl),
    }


def usual_kl_tolerance(first_bits: float | None, second_bits: float | None) -> float:
    """Return nats per token, from the bits per weight of A and of B; None is an unknown number."""
    narrow = second_bits is not None and second_bits < NARROW_BITS
    alike = first_bits is not None and first_bits < NARROW_BITS
    return KL_TOLERANCE_NARROW if narrow and not alike else KL_TOLERANCE


def compare(
    names: tuple[str, str],
    pairs: Sequence[Paired],
    tolerances: dict[str, float],
    differences: Sequence[str] = (),
    allow_unclear: bool = False,
) -> EvalComparison:
    """Judge every measure; `tolerances` maps a kind of loss to its tolerance."""
    measures = [judge(paired, tolerances[paired.kind], len(pairs)) for paired in pairs]
    skills = [measure for measure in measures if measure.name.startswith("skill ")]
    for measure, p in zip(skills, holm([measure.p or 0.0 for measure in skills]), strict=True):
        measure.p = p
    return EvalComparison(
        first=names[0],
        second=names[1],
        measures=measures,
        differences=list(differences),
        allow_unclear=allow_unclear,
    )
