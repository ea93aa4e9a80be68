"""`headway eval MODEL_OR_URL`: suites on a model, against another, with a gate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli import kv_gate, shortened
from headway.cli.common import (
    GATE_FAILED,
    engine_arguments,
    model_folder,
    model_name,
    obtain_model,
    open_served_model,
    report_console,
)
from headway.config.options import AgainstOptions, EngineOptions, EvalOptions, flag_name
from headway.config.options.against import OF_ONE, PREFIX, reference_engine
from headway.core.errors import UsageError
from headway.spec.gguf.header import is_gguf

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.core.scoring import ScoringModel
    from headway.evals.report import EvalReport
    from headway.evals.suites import EvalSettings
    from headway.evals.tasks.task import EvalTask


def evaluate(call: "VerbCall") -> int:
    """Run, compare, write; return 0, or 5 when the gate fails."""
    if len(call.positionals) > 1:
        raise UsageError("eval takes one model.", "headway eval FOLDER --against OTHER")
    options: EvalOptions = call.options[EvalOptions]
    if options.suite == "context":
        return shortened.evaluate(call)
    if options.gate and not options.against:
        raise UsageError("--gate needs something to compare with.", "--against FOLDER|URL|JSON")
    subject = call.positionals[0] if call.positionals else None
    for model in (subject, options.against):
        obtain_model(model or None, call)
    engine: EngineOptions = call.options[EngineOptions]
    reference = reference_engine(engine, call.options[AgainstOptions])
    check_engine_flags(call, subject)
    selection = selection_of(options)
    sources = Sources(call, selection, reference)
    sources.check(subject, options.model)
    if options.against:
        sources.check(options.against, options.against_model)
    if options.gate and sources.are_one(subject):
        raise UsageError(
            f"A and B are one: {options.against} with the same options.",
            "Format options hold for B, those like --against-quantization for A.",
        )
    if "--dry-run" in call.switches:
        print(outline(selection))
        return 0
    check_outputs(options)
    report = sources.report(subject)
    status = publish(report, options)
    if options.gate and is_folder(subject):
        whole = not (reference.kv_layers or reference.kv_read or reference.kv_keep)
        kv_gate.record(model_folder(subject), engine, report, selection.distances, whole)
    return status


def check_engine_flags(call: "VerbCall", subject: str | None) -> None:
    """Raise UsageError for a format option where no model of this machine is loaded."""
    against: str = call.options[EvalOptions].against
    for prefix, what, model in (("", subject, "the model"), (PREFIX, against, "--against")):
        given = [prefix + name for name in OF_ONE if call.sources.get(prefix + name) == "flag"]
        if given and (what == "" or not is_folder(what)):
            named = f"is {what}, which is loaded already" if what else "is not given"
            raise UsageError(
                f"{flag_name(given[0])} holds for {model}, and that {named}.",
                f"Leave {flag_name(given[0])} out, or name a folder or a GGUF file.",
            )


def selection_of(options: EvalOptions) -> "EvalSettings":
    """Return the suites that the options select; UsageError before anything is loaded."""
    from headway.evals.questions import check_skills
    from headway.evals.skills.suite import LEVELS
    from headway.evals.suites import EvalSettings
    from headway.evals.tasks import humaneval
    from headway.evals.texts import Corpora, read_corpora

    asks = options.suite in ("auto", "skills", "all")
    scores = options.suite in ("auto", "text", "all")
    chosen = check_skills(options.skills)
    corpora = read_corpora(options.data, options.windows) if scores else None
    named, at_hand = tasks_of(options)
    if "humaneval" in options.tasks and not options.run_code:
        corpora = corpora or Corpora(texts={}, lambada=[], limit=options.windows)
        corpora.passages[humaneval.NAME] = humaneval.windows(Path(options.data))
    return EvalSettings(
        skills=chosen if asks else [],
        levels=sorted(set(options.levels)) or LEVELS,
        questions=options.questions,
        seed=options.test_seed,
        corpora=corpora,
        tasks=named,
        tasks_at_hand=at_hand,
        distances=sorted(set(options.distances)),
        only_feasible=options.suite == "auto",
    )


def tasks_of(options: EvalOptions) -> "tuple[list[EvalTask], list[EvalTask]]":
    """Return the tasks that run, and those that run where the model can do them."""
    from headway.evals.tasks.table import named_tasks, tasks_at_hand

    limit, code = options.task_questions, options.run_code
    named = named_tasks(options.tasks, options.data, limit, code)
    if options.tasks or options.suite not in ("auto", "tasks", "all"):
        return named, []
    at_hand = tasks_at_hand(options.data, limit, code)
    if options.suite == "tasks" and not at_hand:
        raise UsageError("--suite tasks has no task at hand.", "--tasks NAME, or --data FOLDER.")
    return ([], at_hand) if options.suite == "auto" else (at_hand, [])


def outline(selection: "EvalSettings") -> str:
    """Return the text of `--dry-run`: what a run would ask."""
    lines = []
    if selection.corpora is not None:
        names = ", ".join(selection.corpora.names)
        last = (
            f" and lambada, {len(selection.corpora.lambada):,}" if selection.corpora.lambada else ""
        )
        lines.append(f"text: {names}{last}, {selection.corpora.num_windows:,} passages in all")
    if selection.skills:
        apart = ", ".join(map(str, selection.distances))
        lines.append(
            f"skills{' that the model can do' if selection.only_feasible else ''}: "
            f"{', '.join(selection.skills)}; levels {', '.join(map(str, selection.levels))}; "
            + (f"lookups at {apart} characters; " if apart else "")
            + f"{selection.questions} questions each, at most {selection.num_questions:,}; "
            f"seed {selection.seed}"
        )
    for each in (*selection.tasks, *selection.tasks_at_hand):
        able = " if the model can do it" if each in selection.tasks_at_hand else ""
        lines.append(f"task {each.name}{able}: {len(each):,} questions")
    return "\n".join(lines)


class Sources:
    """The sources of reports: a model of this machine, a URL, or a JSON of an earlier run.

    The subject is loaded with the call's engine options, A with `reference`.
    """

    def __init__(
        self, call: "VerbCall", selection: "EvalSettings", reference: EngineOptions
    ) -> None:
        self._options: EvalOptions = call.options[EvalOptions]
        self._engine: EngineOptions = call.options[EngineOptions]
        self._selection = selection
        self._reference = reference

    def check(self, what: str | None, served_name: str) -> None:
        """Raise for a source that cannot be asked or paired, before any question is asked."""
        from headway.evals.report import read_report
        from headway.evals.url import is_url
        from headway.spec import read_model_spec

        if what is not None and is_report(what):
            report = read_report(what)
            if (
                report.skills
                and self._selection.skills
                and report.skills.seed != self._selection.seed
            ):
                raise UsageError(
                    f"{what} asked the questions of seed {report.skills.seed}.",
                    f"Give --test-seed {report.skills.seed}, or evaluate it anew.",
                )
        elif what is not None and is_url(what):
            with self._opened(what, served_name, self._engine):
                pass
        elif what is not None and ":" in what and not Path(what).exists():
            raise UsageError(f"{what} is no folder and no URL.", f"Perhaps http://{what}?")
        else:
            read_model_spec(model_folder(what))

    def are_one(self, subject: str | None) -> bool:
        """Whether A and B are one model of this machine with the same options."""
        against = self._options.against
        if not (is_folder(subject) and is_folder(against)) or self._engine != self._reference:
            return False
        return model_folder(subject).resolve() == model_folder(against).resolve()

    def report(self, subject: str | None) -> "EvalReport":
        """Return the subject's report, with its comparison."""
        from headway.evals.suites import evaluate, select_suites, side_by_side

        options = self._options
        if not options.against:
            if subject is not None and is_report(subject):
                return self._stored(subject)
            with self._opened(subject, options.model, self._engine) as (model, place):
                selection, left_out = select_suites(model, self._selection)
                report = evaluate(model, place, selection)
            report.notes += left_out
            return report
        first, second = self._both(subject)
        second.against = first
        second.comparison = side_by_side(
            first,
            second,
            tolerance=options.tolerance,
            kl_tolerance=options.kl_tolerance,
            notes=[f"A: {note}" for note in first.notes],
            allow_unclear=options.allow_unclear,
        )
        return second

    def _both(self, subject: str | None) -> tuple["EvalReport", "EvalReport"]:
        """Return the reports of A and B; both are loaded at a time unless one is a saved report."""
        from headway.evals.suites import evaluate, evaluate_both, select_suites, settings_of_report

        options = self._options
        of_b = subject, options.model, self._engine
        of_a = options.against, options.against_model, self._reference
        if is_report(options.against):
            first = self._stored(options.against)
            if subject is not None and is_report(subject):
                return first, self._stored(subject)
            with self._opened(*of_b) as (model, place):
                second = evaluate(model, place, settings_of_report(first, self._selection))
        elif subject is not None and is_report(subject):
            second = self._stored(subject)
            with self._opened(*of_a) as (model, place):
                first = evaluate(
                    model,
                    place,
                    select_suites(model, settings_of_report(second, self._selection))[0],
                )
        else:
            with self._opened(*of_b) as b, self._opened(*of_a) as a:
                return evaluate_both(a, b, self._selection)
        if self._selection.corpora is not None:
            second.notes.append("no divergence: it needs both models, not a report")
        return first, second

    def _stored(self, path: str) -> "EvalReport":
        """Return the report of a JSON file."""
        from headway.evals.report import read_report

        return read_report(path)

    @contextmanager
    def _opened(
        self, what: str | None, served_name: str, engine: EngineOptions
    ) -> Iterator[tuple["ScoringModel", str]]:
        """Open the model of a URL, a folder or a GGUF file; yield it and its place."""
        from headway.evals.url import is_url

        options = self._options
        if what is not None and is_url(what):
            with open_served_model(what, options, served_name) as served:
                yield served, served.url
            return
        from headway.whole_model import FolderModel

        folder = model_folder(what)
        arguments = engine_arguments(engine)
        formats = [f"{flag_name(n)} {arguments[n]}" for n in OF_ONE if n in arguments]
        name = " ".join([model_name(folder), *formats])
        yield FolderModel(folder, name=name, **arguments), str(folder)


def is_report(what: str) -> bool:
    """Whether the word names a report, not a model."""
    return what.endswith(".json") or (Path(what).is_file() and not is_gguf(Path(what)))


def is_folder(what: str | None) -> bool:
    """Whether the word names a model of this machine: no report and no URL."""
    from headway.evals.url import is_url

    return what is None or not (is_report(what) or is_url(what))


def check_outputs(options: EvalOptions) -> None:
    """Check that the output files can be written, before the run."""
    from headway.measure.saved import write

    for path in (options.json, options.html):
        if path and not Path(path).exists():
            write(path, b"")


def publish(report: "EvalReport", options: EvalOptions) -> int:
    """Print the report and write its files; return the exit status by the gate."""
    from headway.evals import page, table
    from headway.measure.saved import write

    if options.json:
        write(options.json, msgspec.json.encode(report))
    if options.html:
        write(options.html, page.html(report, options.gate).encode())
    table.show(report, report_console(), options.gate)
    failed = report.comparison is not None and report.comparison.failed
    return GATE_FAILED if options.gate and failed else 0
