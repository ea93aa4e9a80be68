"""`headway eval MODEL_OR_URL`: suites on a model, against another, with a gate."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli import fewer, kv_gate, shortened
from headway.cli.common import engine_arguments, model_folder, served_model
from headway.core.errors import UsageError
from headway.core.options import EngineOptions, EvalOptions

if TYPE_CHECKING:
    from headway.cli.main import Call
    from headway.core.scoring import Model
    from headway.evals.report import Report
    from headway.evals.suites import Wanted

GATE_FAILED = 5
"""The exit status that says: the suites ran, and the model is surely worse."""


def evaluate(call: "Call") -> int:
    """Run, compare, write; 0, or 5 when the gate fails."""
    if len(call.positionals) > 1:
        raise UsageError("eval takes one model.", "headway eval FOLDER --against OTHER")
    options: EvalOptions = call.options[EvalOptions]
    if options.suite == "context":
        return shortened.evaluate(call)
    if options.suite == "examples":
        return fewer.evaluate(call)
    if options.gate and not options.against:
        raise UsageError("--gate needs something to compare with.", "--against FOLDER|URL|JSON")
    subject = call.positionals[0] if call.positionals else None
    wanted = wants(options)
    sources = Sources(call, wanted)
    sources.check(subject, options.model)
    if options.against:
        sources.check(options.against, options.against_model)
    if "--dry-run" in call.switches:
        print(outline(wanted))
        return 0
    check_outputs(options)
    report = sources.report(subject)
    status = publish(report, options)
    if options.gate and is_folder(subject):
        kv_gate.record(model_folder(subject), sources.engine, report, wanted.distances)
    return status


def wants(options: EvalOptions) -> "Wanted":
    """What the options ask of a model; UsageError before anything is loaded."""
    from headway.evals.questions import check_skills
    from headway.evals.skills.suite import LEVELS
    from headway.evals.suites import Wanted
    from headway.evals.texts import read_corpora

    asks = options.suite in ("skills", "all")
    scores = options.suite in ("text", "all")
    chosen = check_skills(options.skills)
    return Wanted(
        skills=chosen if asks else [],
        levels=sorted(set(options.levels)) or LEVELS,
        questions=options.questions,
        seed=options.test_seed,
        corpora=read_corpora(options.data, options.windows) if scores else None,
        distances=sorted(set(options.distances)),
    )


def outline(wanted: "Wanted") -> str:
    """What a run would ask."""
    lines = []
    if wanted.skills:
        apart = ", ".join(map(str, wanted.distances))
        lines.append(
            f"skills: {', '.join(wanted.skills)}; levels {', '.join(map(str, wanted.levels))}; "
            + (f"lookups at {apart} characters; " if apart else "")
            + f"{wanted.questions} questions each, at most {wanted.num_questions:,}; "
            f"seed {wanted.seed}"
        )
    if wanted.corpora is not None:
        names = ", ".join(wanted.corpora.texts)
        lines.append(f"text: {names} and lambada, {wanted.corpora.num_windows:,} passages")
    return "\n".join(lines)


class Sources:
    """Where reports come from: a folder, a URL, or a JSON that an earlier run wrote."""

    def __init__(self, call: "Call", wanted: "Wanted") -> None:
        self._options: EvalOptions = call.options[EvalOptions]
        self.engine: EngineOptions = call.options[EngineOptions]
        self._wanted = wanted

    def check(self, what: str | None, model_name: str) -> None:
        """Raise for what cannot be asked or paired, before anything is asked."""
        from headway.core.model_spec import read_model_spec
        from headway.evals.report import read_report
        from headway.evals.url import is_url

        if what is not None and is_report(what):
            report = read_report(what)
            if report.skills and self._wanted.skills and report.skills.seed != self._wanted.seed:
                raise UsageError(
                    f"{what} asked the questions of seed {report.skills.seed}.",
                    f"Give --test-seed {report.skills.seed}, or evaluate it anew.",
                )
        elif what is not None and is_url(what):
            with self._opened(what, model_name):
                pass
        elif what is not None and ":" in what and not Path(what).exists():
            raise UsageError(f"{what} is no folder and no URL.", f"Perhaps http://{what}?")
        else:
            read_model_spec(model_folder(what))

    def report(self, subject: str | None) -> "Report":
        """The subject's report, with its comparison."""
        from headway.evals import suites

        options, against = self._options, self._options.against
        if not against:
            return self._alone(subject, options.model)
        first, second, notes = self._both(subject)
        second.against = first
        second.comparison = suites.side_by_side(
            first,
            second,
            tolerance=options.tolerance,
            kl_tolerance=options.kl_tolerance,
            notes=notes,
        )
        return second

    def _both(self, subject: str | None) -> tuple["Report", "Report", list[str]]:
        """A, B and notes; both in memory at a time only where they are compared by token."""
        from headway.evals.suites import diverge, evaluate

        options, corpora = self._options, self._wanted.corpora
        stored = is_report(options.against) or (subject is not None and is_report(subject))
        if corpora is None or stored:
            second = self._alone(subject, options.model)
            first = self._alone(options.against, options.against_model, self._reference)
            notes = ["no divergence: it needs both models, not a report"] if corpora else []
            return first, second, notes
        with (
            self._opened(subject, options.model) as (model, place),
            self._opened(options.against, options.against_model, self._reference) as (
                other,
                other_place,
            ),
        ):
            second = evaluate(model, place, self._wanted)
            first = evaluate(other, other_place, self._wanted)
            second.divergence, notes = diverge(other, model, corpora)
        return first, second, notes

    @property
    def _reference(self) -> EngineOptions:
        """What holds for a folder A: all but what B's layers leave unread, and the file of them."""
        return replace(self.engine, kv_layers="", kv_read="", kv_keep="")

    def _alone(
        self, what: str | None, model_name: str, engine: EngineOptions | None = None
    ) -> "Report":
        """The report of a JSON file, or of a model that is asked now."""
        from headway.evals.report import read_report
        from headway.evals.suites import evaluate

        if what is not None and is_report(what):
            return read_report(what)
        with self._opened(what, model_name, engine) as (model, place):
            return evaluate(model, place, self._wanted)

    @contextmanager
    def _opened(
        self, what: str | None, model_name: str, engine: EngineOptions | None = None
    ) -> Iterator[tuple["Model", str]]:
        """The model of a URL or a folder, and where it is."""
        from headway.evals.url import is_url

        options = self._options
        if what is not None and is_url(what):
            with served_model(what, options, model_name) as served:
                yield served, served.url
            return
        from headway.whole_model import FolderModel

        folder = model_folder(what)
        name = folder.resolve().name
        arguments = engine_arguments(engine or self.engine)
        yield FolderModel(folder, name=name, **arguments), str(folder)


def is_report(what: str) -> bool:
    """Whether the word is a JSON file and no model."""
    return what.endswith(".json") or Path(what).is_file()


def is_folder(what: str | None) -> bool:
    """Whether the word names a model of this machine: no report and no URL."""
    from headway.evals.url import is_url

    return what is None or not (is_report(what) or is_url(what))


def check_outputs(options: EvalOptions) -> None:
    """Files are checked before the run: a typo must not cost it."""
    from headway.measure.saved import write

    for path in (options.json, options.html):
        if path and not Path(path).exists():
            write(path, b"")


def publish(report: "Report", options: EvalOptions) -> int:
    """Print the report, write its files, and let the gate decide."""
    from rich.console import Console

    from headway.evals import page, table
    from headway.measure.saved import write

    if options.json:
        write(options.json, msgspec.json.encode(report))
    if options.html:
        write(options.html, page.html(report, options.gate).encode())
    table.show(report, Console(width=None if sys.stdout.isatty() else 160), options.gate)
    failed = report.comparison is not None and report.comparison.worse
    return GATE_FAILED if options.gate and failed else 0
