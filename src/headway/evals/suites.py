"""Runs the suites on one model, and sets two reports side by side.

It is given a `core.scoring.Model` and what is wanted of it. It promises a `Report` that depends on
the model and the wants alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import headway
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.core.scoring import Model
from headway.evals import questions, texts
from headway.evals.pairs import (
    NATS,
    POINTS,
    RELATIVE,
    Comparison,
    Paired,
    compare,
    skill_pairs,
)
from headway.evals.report import Report
from headway.evals.texts import (
    Corpora,
    DivergenceReport,
    divergence_pairs,
    text_pairs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of a model; without corpora no text is scored, without skills none is asked."""

    skills: Sequence[str]
    levels: Sequence[int]
    questions: int
    seed: int
    corpora: Corpora | None
    distances: Sequence[int] = ()
    """Characters between list and question of lookups that are asked besides."""

    @property
    def num_questions(self) -> int:
        """At most: a skill with few phrasings may have fewer."""
        rows = len(self.skills) + (len(self.distances) if self.skills else 0)
        return rows * len(self.levels) * self.questions


def evaluate(model: Model, place: str, wanted: Wanted) -> Report:
    """Run the suites, with a bar each on stderr."""
    began, start_s = datetime.now(UTC), time.perf_counter()
    report = Report(
        headway=headway.__version__,
        model=model.name,
        place=place,
        began=began.isoformat(timespec="seconds"),
        seconds=0.0,
    )
    if wanted.skills:
        with items_bar(f"{model.name}: skills", wanted.num_questions) as advance:
            report.skills = questions.ask(
                model,
                skills=wanted.skills,
                levels=wanted.levels,
                questions=wanted.questions,
                seed=wanted.seed,
                distances=wanted.distances,
                advance=advance,
            )
    if wanted.corpora is not None:
        with items_bar(f"{model.name}: text", wanted.corpora.num_windows) as advance:
            report.text = texts.ask(model, wanted.corpora, advance)
    report.seconds = round(time.perf_counter() - start_s, 3)
    return report


def diverge(
    first: Model, second: Model, corpora: Corpora
) -> tuple[DivergenceReport | None, list[str]]:
    """Token by token on each text, and why not where that cannot be."""
    total = len(corpora.texts) * (corpora.limit or texts.DIVERGENCE_WINDOWS)
    try:
        with items_bar(f"{second.name} against {first.name}", total) as advance:
            return texts.diverge(first, second, corpora, advance), []
    except UsageError as error:
        return None, [f"no divergence: {error.cause}"]


def side_by_side(
    first: Report,
    second: Report,
    *,
    tolerance: float,
    kl_tolerance: float,
    notes: Sequence[str] = (),
) -> Comparison:
    """B, the second, against A, on what both were asked."""
    pairs: list[Paired] = []
    differences = list(notes)
    if first.skills is not None and second.skills is not None:
        pairs += skill_pairs(first.skills, second.skills)
        differences += unlike(first, second, "skills", ("seed", "questions"))
    if first.text is not None and second.text is not None:
        pairs += text_pairs(first.text, second.text)
        differences += unlike(first, second, "text", ("limit",))
    if second.divergence is not None:
        pairs += divergence_pairs(second.divergence)
    if not pairs:
        raise UsageError(
            f"{first.model} and {second.model} were not asked the same suite.",
            "Give both the same --suite.",
        )
    tolerances = {POINTS: tolerance, RELATIVE: tolerance, NATS: kl_tolerance}
    return compare((first.model, second.model), pairs, tolerances, differences)


def unlike(first: Report, second: Report, suite: str, names: Sequence[str]) -> list[str]:
    """What was not asked alike: "skills: questions is 50 in A and 100 in B"."""
    pairs = [(name, *(getattr(getattr(r, suite), name) for r in (first, second))) for name in names]
    return [f"{suite}: {name} is {a} in A and {b} in B" for name, a, b in pairs if a != b]
