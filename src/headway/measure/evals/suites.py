"""Runs the suites on one model, and sets two reports side by side.

It is given a `core.scoring.Model` and what is wanted of it. It promises a `Report` that depends on
the model and the wants alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import headway
from headway.core.progress import items_bar
from headway.core.scoring import Model
from headway.measure.evals import skills
from headway.measure.evals.pairs import NATS, POINTS, RELATIVE, Comparison, compare, skill_pairs
from headway.measure.evals.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of a model."""

    suites: frozenset[str]
    skills: Sequence[str]
    levels: Sequence[int]
    questions: int
    seed: int


def evaluate(model: Model, place: str, wanted: Wanted) -> Report:
    """Run the suites, with a bar on stderr."""
    began, start_s = datetime.now(UTC), time.perf_counter()
    report = Report(
        headway=headway.__version__,
        model=model.name,
        place=place,
        began=began.isoformat(timespec="seconds"),
        seconds=0.0,
    )
    if "skills" in wanted.suites:
        total = len(wanted.skills) * len(wanted.levels) * wanted.questions
        with items_bar(f"{model.name}: skills", total) as advance:
            report.skills = skills.ask(
                model,
                skills=wanted.skills,
                levels=wanted.levels,
                questions=wanted.questions,
                seed=wanted.seed,
                advance=advance,
            )
    report.seconds = round(time.perf_counter() - start_s, 3)
    return report


def side_by_side(
    first: Report, second: Report, *, tolerance: float, kl_tolerance: float
) -> Comparison:
    """B, the second, against A, on what both were asked."""
    pairs, differences = [], []
    if first.skills is not None and second.skills is not None:
        pairs += skill_pairs(first.skills, second.skills)
        differences += unlike(first, second, "skills", ("seed", "questions"))
    tolerances = {POINTS: tolerance, RELATIVE: tolerance, NATS: kl_tolerance}
    return compare((first.model, second.model), pairs, tolerances, differences)


def unlike(first: Report, second: Report, suite: str, names: Sequence[str]) -> list[str]:
    """What was not asked alike: "skills: questions 50 and 100"."""
    pairs = [(name, *(getattr(getattr(r, suite), name) for r in (first, second))) for name in names]
    return [f"{suite}: {name} {a} and {b}" for name, a, b in pairs if a != b]
