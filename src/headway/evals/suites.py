"""Runs the suites on one model, and sets two reports side by side.

It is given a `core.scoring.Model` and what is wanted of it. It promises a `Report` that depends on
the model and the wants alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import headway
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.core.scoring import Model
from headway.evals import questions, texts
from headway.evals.pairs import (
    Comparison,
    Paired,
    compare,
    skill_pairs,
    task_pairs,
    tolerances,
    usual_kl_tolerance,
)
from headway.evals.report import Report
from headway.evals.skills.suite import SKILLS
from headway.evals.tasks import task
from headway.evals.tasks.task import Task
from headway.evals.texts import Corpora, divergence_pairs, text_pairs

PROBED, NEEDED = 6, 4
"""A skill is asked where the model gets so many of so many first questions right."""


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
    tasks: Sequence[Task] = ()
    tasks_at_hand: Sequence[Task] = ()
    """Tasks that are asked where the model can do them."""
    fitting: bool = False
    """Of skills those that A can do, and a text only where its tokens' probabilities are told."""

    @property
    def num_questions(self) -> int:
        """At most: a skill with few phrasings may have fewer."""
        rows = len(self.skills) + len(self.distances)
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
    report.bits = getattr(model, "bits", None)
    if wanted.skills or wanted.distances:
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
    if wanted.tasks:
        total = sum(map(len, wanted.tasks))
        with items_bar(f"{model.name}: tasks", total) as advance:
            report.tasks = task.ask(model, wanted.tasks, advance)
    if wanted.corpora is not None:
        try:
            with items_bar(f"{model.name}: text", wanted.corpora.num_windows) as advance:
                report.text = texts.ask(model, wanted.corpora, advance)
        except UsageError as error:
            if not wanted.fitting:
                raise
            report.notes.append(f"no text: {error.cause}")
    report.seconds = round(time.perf_counter() - start_s, 3)
    return report


def fit(model: Model, wanted: Wanted) -> tuple[Wanted, list[str]]:
    """The skills and tasks that the model can do, by measurement; and what was left out."""
    able, notes = task.able(model, wanted.tasks_at_hand)
    wanted = replace(wanted, tasks=[*wanted.tasks, *able], tasks_at_hand=())
    if not wanted.fitting or not wanted.skills:
        return wanted, notes
    asked = len(wanted.skills) * PROBED
    with items_bar(f"{model.name}: which skills", asked) as advance:
        probe = questions.ask(
            model,
            skills=wanted.skills,
            levels=wanted.levels[:1],
            questions=PROBED,
            seed=wanted.seed,
            advance=advance,
        )
    right = {share.skill: share.right for share in probe.shares}
    skills = [skill for skill in wanted.skills if right[skill] >= NEEDED]
    rest = ", ".join(f"{skill} {right[skill]}" for skill in wanted.skills if skill not in skills)
    note = f"skills not asked, for {model.name} has under {NEEDED} of {PROBED} right: {rest}"
    notes += [note] if rest else []
    return replace(wanted, skills=skills), notes


def as_asked(report: Report, wanted: Wanted) -> Wanted:
    """What is wanted, of the skills and tasks that a stored report has."""
    names = {item.skill for item in report.tasks.items} if report.tasks else set()
    tasks = [each for each in wanted.tasks_at_hand if each.name in names]
    wanted = replace(wanted, tasks=[*wanted.tasks, *tasks], tasks_at_hand=())
    if not wanted.fitting or report.skills is None:
        return replace(wanted, skills=()) if wanted.fitting else wanted
    found = {item.skill for item in report.skills.items}
    return replace(wanted, skills=[skill for skill in SKILLS if skill in found])


def evaluate_both(
    first: tuple[Model, str], second: tuple[Model, str], wanted: Wanted
) -> tuple[Report, Report]:
    """A and B asked the same, their texts token by token in one pass where they cut them alike."""
    wanted, left_out = fit(first[0], wanted)
    asked = replace(wanted, corpora=None)
    a, b = (evaluate(model, place, asked) for model, place in (first, second))
    b.notes += left_out
    if wanted.corpora is None:
        return a, b
    began_s = time.perf_counter()
    total = wanted.corpora.num_windows + len(wanted.corpora.lambada)
    try:
        with items_bar(f"{b.model} against {a.model}: text", total) as advance:
            a.text, b.text, b.divergence = texts.compare(
                first[0], second[0], wanted.corpora, advance
            )
    except UsageError as error:
        b.notes.append(f"no divergence: {error.cause}")
        only = replace(wanted, skills=(), distances=(), tasks=())
        for report, (model, place) in ((a, first), (b, second)):
            alone = evaluate(model, place, only)
            report.text, report.notes = alone.text, report.notes + alone.notes
    b.seconds = round(b.seconds + time.perf_counter() - began_s, 3)
    return a, b


def side_by_side(
    first: Report,
    second: Report,
    *,
    tolerance: float,
    kl_tolerance: float | None = None,
    notes: Sequence[str] = (),
    allow_unclear: bool = False,
) -> Comparison:
    """B, the second, against A, on what both were asked.

    `kl_tolerance` follows the bits of the two where it is None. Texts are required; where none is
    compared, all that was asked is.
    """
    pairs: list[Paired] = []
    differences = [*notes]
    if first.skills is not None and second.skills is not None:
        pairs += skill_pairs(first.skills, second.skills)
        differences += unlike(first, second, "skills", ("seed", "questions"))
    if first.tasks is not None and second.tasks is not None:
        pairs += task_pairs(first.tasks, second.tasks)
        differences += unlike(first, second, "tasks", ("questions",))
    compared = second.divergence.texts if second.divergence is not None else []
    if first.text is not None and second.text is not None:
        pairs += text_pairs(first.text, second.text, frozenset(each.name for each in compared))
        differences += unlike(first, second, "text", ("limit",))
    if second.divergence is not None:
        pairs += divergence_pairs(second.divergence)
    if not any(pair.required for pair in pairs):
        pairs = [replace(pair, required=not pair.name.startswith("skill ")) for pair in pairs]
    if not pairs:
        raise UsageError(
            f"{first.model} and {second.model} were not asked the same suite.",
            "Give both the same --suite.",
        )
    if kl_tolerance is None:
        kl_tolerance = usual_kl_tolerance(first.bits, second.bits)
        bits = [f"{bits:.1f}" if bits else "?" for bits in (first.bits, second.bits)]
        if compared:
            differences.append(
                f"KL may be {kl_tolerance:g}: A holds {bits[0]} bits a weight, B {bits[1]}"
            )
    limits = tolerances(tolerance, kl_tolerance)
    return compare((first.model, second.model), pairs, limits, differences, allow_unclear)


def unlike(first: Report, second: Report, suite: str, names: Sequence[str]) -> list[str]:
    """What was not asked alike: "skills: questions is 50 in A and 100 in B"."""
    pairs = [(name, *(getattr(getattr(r, suite), name) for r in (first, second))) for name in names]
    return [f"{suite}: {name} is {a} in A and {b} in B" for name, a, b in pairs if a != b]
