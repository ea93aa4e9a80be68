"""Run the suites on one model, and compare two reports.

A report depends only on the model (a `core.scoring.Model`) and the settings.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import headway
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.core.scoring import ScoringModel
from headway.evals import questions, texts
from headway.evals.pairs import (
    EvalComparison,
    Paired,
    compare,
    skill_pairs,
    task_pairs,
    tolerances,
    usual_kl_tolerance,
)
from headway.evals.report import EvalReport
from headway.evals.skills.suite import SKILLS
from headway.evals.tasks import task
from headway.evals.tasks.task import EvalTask
from headway.evals.texts import Corpora, divergence_pairs, text_pairs

PROBE_QUESTIONS, MIN_PROBE_RIGHT = 6, 4
"""A skill is part of the run if the model has MIN_PROBE_RIGHT of PROBE_QUESTIONS questions
right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """What a run contains; without corpora no text is scored, without skills no question is
    asked."""

    skills: Sequence[str]
    levels: Sequence[int]
    questions: int
    seed: int
    corpora: Corpora | None
    distances: Sequence[int] = ()
    """Characters between list and question of the additional lookups."""
    tasks: Sequence[EvalTask] = ()
    tasks_at_hand: Sequence[EvalTask] = ()
    """Tasks that are part of the run if the model can do them."""
    only_feasible: bool = False
    """Keep only skills that A can do, and skip texts if the server returns no log-probabilities."""

    @property
    def num_questions(self) -> int:
        """Upper bound: a skill with few phrasings may have fewer questions."""
        rows = len(self.skills) + len(self.distances)
        return rows * len(self.levels) * self.questions


def evaluate(model: ScoringModel, place: str, settings: EvalSettings) -> EvalReport:
    """Run the suites, each with a progress bar on stderr."""
    began, start_s = datetime.now(UTC), time.perf_counter()
    report = EvalReport(
        headway=headway.__version__,
        model=model.name,
        place=place,
        began=began.isoformat(timespec="seconds"),
        seconds=0.0,
    )
    report.bits = getattr(model, "bits", None)
    if settings.skills or settings.distances:
        with items_bar(f"{model.name}: skills", settings.num_questions) as advance:
            report.skills = questions.ask(
                model,
                skills=settings.skills,
                levels=settings.levels,
                questions=settings.questions,
                seed=settings.seed,
                distances=settings.distances,
                advance=advance,
            )
    if settings.tasks:
        total = sum(map(len, settings.tasks))
        with items_bar(f"{model.name}: tasks", total) as advance:
            report.tasks = task.ask(model, settings.tasks, advance)
    if settings.corpora is not None:
        try:
            with items_bar(f"{model.name}: text", settings.corpora.num_windows) as advance:
                report.text = texts.ask(model, settings.corpora, advance)
        except UsageError as error:
            if not settings.only_feasible:
                raise
            report.notes.append(f"no text: {error.cause}")
    report.seconds = round(time.perf_counter() - start_s, 3)
    return report


def select_suites(model: ScoringModel, settings: EvalSettings) -> tuple[EvalSettings, list[str]]:
    """Drop the skills and tasks that the model cannot do in a short probe; also return notes on
    them."""
    able, notes = task.feasible_tasks(model, settings.tasks_at_hand)
    settings = replace(settings, tasks=[*settings.tasks, *able], tasks_at_hand=())
    if not settings.only_feasible or not settings.skills:
        return settings, notes
    total = len(settings.skills) * PROBE_QUESTIONS
    with items_bar(f"{model.name}: which skills", total) as advance:
        probe = questions.ask(
            model,
            skills=settings.skills,
            levels=settings.levels[:1],
            questions=PROBE_QUESTIONS,
            seed=settings.seed,
            advance=advance,
        )
    right = {share.skill: share.right for share in probe.shares}
    skills = [skill for skill in settings.skills if right[skill] >= MIN_PROBE_RIGHT]
    rest = ", ".join(f"{skill} {right[skill]}" for skill in settings.skills if skill not in skills)
    note = (
        f"skills not asked, for {model.name} has under {MIN_PROBE_RIGHT} of {PROBE_QUESTIONS} "
        f"right: {rest}"
    )
    notes += [note] if rest else []
    return replace(settings, skills=skills), notes


def settings_of_report(report: EvalReport, settings: EvalSettings) -> EvalSettings:
    """Restrict the settings to the skills and tasks of a saved report."""
    names = {item.skill for item in report.tasks.items} if report.tasks else set()
    tasks = [each for each in settings.tasks_at_hand if each.name in names]
    settings = replace(settings, tasks=[*settings.tasks, *tasks], tasks_at_hand=())
    if not settings.only_feasible or report.skills is None:
        return replace(settings, skills=()) if settings.only_feasible else settings
    recorded = {item.skill for item in report.skills.items}
    return replace(settings, skills=[skill for skill in SKILLS if skill in recorded])


def evaluate_both(
    first: tuple[ScoringModel, str], second: tuple[ScoringModel, str], settings: EvalSettings
) -> tuple[EvalReport, EvalReport]:
    """Run A and B with the same settings; texts in one pass, if both tokenize them alike."""
    settings, notes = select_suites(first[0], settings)
    without_text = replace(settings, corpora=None)
    a, b = (evaluate(model, place, without_text) for model, place in (first, second))
    b.notes += notes
    if settings.corpora is None:
        return a, b
    began_s = time.perf_counter()
    total = settings.corpora.num_windows + len(settings.corpora.lambada)
    try:
        with items_bar(f"{b.model} against {a.model}: text", total) as advance:
            a.text, b.text, b.divergence = texts.compare(
                first[0], second[0], settings.corpora, advance
            )
    except UsageError as error:
        b.notes.append(f"no divergence: {error.cause}")
        only = replace(settings, skills=(), distances=(), tasks=())
        for report, (model, place) in ((a, first), (b, second)):
            alone = evaluate(model, place, only)
            report.text, report.notes = alone.text, report.notes + alone.notes
    b.seconds = round(b.seconds + time.perf_counter() - began_s, 3)
    return a, b


def side_by_side(
    first: EvalReport,
    second: EvalReport,
    *,
    tolerance: float,
    kl_tolerance: float | None = None,
    notes: Sequence[str] = (),
    allow_unclear: bool = False,
) -> EvalComparison:
    """Compare B (`second`) with A on all that both reports contain.

    If `kl_tolerance` is None, it follows from the bits per weight of both. Texts are required
    measures; if no text is compared, every other measure but the single skills is required.
    """
    pairs: list[Paired] = []
    differences = [*notes]
    if first.skills is not None and second.skills is not None:
        pairs += skill_pairs(first.skills, second.skills)
        differences += list_differences(first, second, "skills", ("seed", "questions"))
    if first.tasks is not None and second.tasks is not None:
        pairs += task_pairs(first.tasks, second.tasks)
        differences += list_differences(first, second, "tasks", ("questions",))
    compared = second.divergence.texts if second.divergence is not None else []
    if first.text is not None and second.text is not None:
        pairs += text_pairs(first.text, second.text, frozenset(each.name for each in compared))
        differences += list_differences(first, second, "text", ("limit",))
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


def list_differences(
    first: EvalReport, second: EvalReport, suite: str, names: Sequence[str]
) -> list[str]:
    """List the settings that differ, e.g. "skills: questions is 50 in A and 100 in B"."""
    pairs = [(name, *(getattr(getattr(r, suite), name) for r in (first, second))) for name in names]
    return [f"{suite}: {name} is {a} in A and {b} in B" for name, a, b in pairs if a != b]
