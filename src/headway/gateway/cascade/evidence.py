"""Evidence about a cheap route by task: how often it is right where a check accepts its answer.

    150 questions  dear right 149   cheap right 121   check margin, at least 0.7 nats
    accepted 96, of which 1 was wrong where the dear route was right: lost 1 of 150
    the loss is below 3.1% with confidence 1 - alpha: within a tolerance of 5%, so it is used

Thresholds are tried from the strictest on, up to the first that fails its test: a fixed sequence,
so all that pass hold together at `alpha` (Angelopoulos et al., "Learn then Test", 2021). The checks
share `alpha`. A task without a valid row uses the dear route.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.core.errors import UsageError

NUM_THRESHOLDS = 20
"""Number of thresholds tried per check: quantiles of its scores."""
DAY_S = 86_400
VALIDITY_ONLY = ""
"""The check that accepts every answer that is valid and complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePair:
    """Answers of both routes to one question. Costs are in dollars.

    `fits` says whether the cheap answer is valid and complete. `scores` are by check, `check_costs`
    the dollars of each score.
    """

    task: str
    cheap_right: bool
    dear_right: bool
    fits: bool
    scores: dict[str, float | None]
    cheap_cost: float
    dear_cost: float
    check_costs: dict[str, float] = field(default_factory=dict)


class TaskEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of one task class. `loss_high` bounds the share of questions that the cascade loses,
    with confidence 1 - alpha; costs are dollars per question."""

    task: str
    asked: int
    cheap_right: int
    dear_right: int
    check: str = VALIDITY_ONLY
    least: float | None = None
    """Minimum score of an accepted answer; None accepts each answer that is valid and complete."""
    accepted: int = 0
    lost: int = 0
    gained: int = 0
    loss_low: float = 0.0
    loss_high: float = 1.0
    cheap_cost: float = 0.0
    dear_cost: float = 0.0
    cost: float = 0.0
    """Cost of the cascade."""
    use: bool = False
    why: str = ""


class EvidenceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `headway gateway calibrate`; `fingerprints` have the keys "cheap" and "dear"."""

    model: str
    cheap: str
    made_at: float
    tolerance: float
    alpha: float
    fingerprints: dict[str, list[str]] = {}
    tasks: list[TaskEvidence] = []


def read_evidence(path: Path) -> EvidenceFile | None:
    """Read the file; None if it does not exist, UsageError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvidenceFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} is no evidence: {str(error)[:200]}.", "headway gateway calibrate writes it."
        ) from error


def evaluate_task(pairs: Sequence[RoutePair], tolerance: float, alpha: float) -> TaskEvidence:
    """Return the evidence of one task: the cheapest check within the tolerance."""
    checks = [VALIDITY_ONLY, *(pairs[0].scores if pairs else ())]
    ways = [
        way
        for check in checks
        for way in passing_thresholds(pairs, check, tolerance, alpha / len(checks))
    ]
    dear = sum(pair.dear_cost for pair in pairs) / max(1, len(pairs))
    best = min(ways, key=lambda way: way.cost, default=None)
    if best is None:
        few = upper_bound(0, len(pairs), alpha / len(checks)) > tolerance
        why = f"{len(pairs)} questions are too few" if few else "it loses too many right answers"
        return threshold_evidence(pairs, VALIDITY_ONLY, None, alpha, use=False, why=why)
    if best.cost >= dear:
        return msgspec.structs.replace(best, use=False, why="it costs no less")
    return best


def passing_thresholds(
    pairs: Sequence[RoutePair], check: str, tolerance: float, alpha: float
) -> list[TaskEvidence]:
    """Return the thresholds of a check that hold, strictest first, up to the first that fails."""
    ways = []
    for least in thresholds(pairs, check):
        way = threshold_evidence(pairs, check, least, alpha, use=True, why="")
        if way.loss_high > tolerance:
            break
        ways.append(way)
    return ways


def thresholds(pairs: Sequence[RoutePair], check: str) -> list[float | None]:
    """Return the thresholds to try, falling: [2.0, 1.4, …, the lowest score]."""
    if check == VALIDITY_ONLY:
        return [None]
    scores = sorted(
        (score for pair in pairs if (score := pair.scores[check]) is not None), reverse=True
    )
    places = [
        round((number + 1) / NUM_THRESHOLDS * len(scores)) - 1 for number in range(NUM_THRESHOLDS)
    ]
    return list(dict.fromkeys(scores[place] for place in places if place >= 0))


def accepts(pair: RoutePair, check: str, least: float | None) -> bool:
    if not pair.fits or least is None:
        return pair.fits
    score = pair.scores[check]
    return score is not None and score >= least


def threshold_evidence(
    pairs: Sequence[RoutePair],
    check: str,
    least: float | None,
    alpha: float,
    *,
    use: bool,
    why: str,
) -> TaskEvidence:
    """Return the evidence for one check with one threshold on these questions."""
    accepted = [pair for pair in pairs if accepts(pair, check, least)]
    lost = sum(pair.dear_right and not pair.cheap_right for pair in accepted)
    count = max(1, len(pairs))
    spent = sum(pair.cheap_cost + pair.check_costs.get(check, 0.0) for pair in pairs)
    rest = sum(pair.dear_cost for pair in pairs if not accepts(pair, check, least))
    return TaskEvidence(
        task=pairs[0].task if pairs else "",
        asked=len(pairs),
        cheap_right=sum(pair.cheap_right for pair in pairs),
        dear_right=sum(pair.dear_right for pair in pairs),
        check=check,
        least=least,
        accepted=len(accepted),
        lost=lost,
        gained=sum(pair.cheap_right and not pair.dear_right for pair in accepted),
        loss_low=lower_share_bound(lost, len(pairs), alpha),
        loss_high=upper_bound(lost, len(pairs), alpha),
        cheap_cost=sum(pair.cheap_cost for pair in pairs) / count,
        dear_cost=sum(pair.dear_cost for pair in pairs) / count,
        cost=(spent + rest) / count,
        use=use,
        why=why,
    )


def upper_bound(events: int, trials: int, alpha: float) -> float:
    """Return the one-sided upper bound of a share, exact (Clopper and Pearson).

    0 of 59 at alpha 0.05: 4.95%; 1 of 150: 3.1%.
    """
    if events >= trials:
        return 1.0
    return bisect_end(
        lambda share: binomial_cdf(events, trials, share) > alpha, events / trials, 1.0
    )


def lower_share_bound(events: int, trials: int, alpha: float) -> float:
    """Return the one-sided lower bound of a share; 0 without an event."""
    if events == 0:
        return 0.0
    return bisect_end(
        lambda share: 1 - binomial_cdf(events - 1, trials, share) < alpha, 0.0, events / trials
    )


def bisect_end(below: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition that holds at `low` ends, by bisection."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def binomial_cdf(events: int, trials: int, share: float) -> float:
    """Return P(X <= events) of a binomial of `trials` with this share."""
    if share <= 0.0 or share >= 1.0:
        return 1.0 if share <= 0.0 else float(events >= trials)
    total = 0.0
    for k in range(events + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        total += math.exp(ways + k * math.log(share) + (trials - k) * math.log1p(-share))
    return min(1.0, total)
