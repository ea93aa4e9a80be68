"""Evaluation and gate of a folder that a verb has just written, by the code of `headway eval`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import GATE_FAILED
from headway.cli.evaluate import Sources, check_outputs, publish, selection_of
from headway.config.options import EngineOptions, EvalOptions, GateOptions
from headway.core.errors import UsageError
from headway.evals.pairs import NATS, PERPLEXITY, POINTS, POSITIONS, RELATIVE

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.compress.calibration import HeldOut
    from headway.evals.report import EvalReport

LOSS_UNITS = {
    POINTS: "a share",
    POSITIONS: "a share of the tokens",
    RELATIVE: "a part of the bits",
    PERPLEXITY: "a part of the perplexity",
    NATS: "nats a token",
}
"""Kind of loss → its unit in a card."""


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """The quality in Markdown for a model card, whether the gate failed, and the report."""

    markdown: str = ""
    failed: bool = False
    report: "EvalReport | None" = None


def eval_call(call: "VerbCall") -> "VerbCall":
    """Return the call of `headway eval` for --against and the options of the gate."""
    gate: GateOptions = call.options[GateOptions]
    options = EvalOptions(
        against=gate.against,
        gate=gate.gate,
        allow_unclear=gate.allow_unclear,
        tolerance=gate.tolerance,
        kl_tolerance=gate.kl_tolerance,
        questions=gate.questions,
        distances=gate.distances,
        data=gate.eval_data,
        windows=gate.windows,
        json=gate.json,
    )
    return replace(call, options={EvalOptions: options, EngineOptions: EngineOptions()})


def report_sources(call: "VerbCall") -> Sources:
    """Return where the reports of the new model and of --against come from."""
    return Sources(call, selection_of(call.options[EvalOptions]), call.options[EngineOptions])


def check_gate(call: "VerbCall") -> None:
    """Raise UsageError where the evaluation would fail, before anything is computed."""
    gate: GateOptions = call.options[GateOptions]
    if not gate.against:
        if gate.gate:
            raise UsageError("--gate needs something to compare with.", "--against FOLDER|URL|JSON")
        return
    called = eval_call(call)
    options: EvalOptions = called.options[EvalOptions]
    report_sources(called).check(gate.against, "")
    check_outputs(options)


def held_out(call: "VerbCall") -> "HeldOut":
    """Return the held-out texts: the skills' questions, and the texts of --eval-data."""
    from headway.compress.calibration import HeldOut

    data = call.options[GateOptions].eval_data
    return HeldOut.of(Path(data) if data else None)


def evaluate_folder(call: "VerbCall", folder: Path, name: str) -> QualityFigures:
    """Evaluate `folder`, print the report, and return the figures of the card of `name`."""
    if not call.options[GateOptions].against:
        return QualityFigures()
    called = eval_call(call)
    options: EvalOptions = called.options[EvalOptions]
    report = report_sources(called).report(str(folder))
    report.model = name
    status = publish(report, options)
    return QualityFigures(format_markdown(report), status == GATE_FAILED, report)


def format_markdown(report: "EvalReport") -> str:
    """Return a table of every measure of both models, with interval and verdict."""
    assert report.comparison is not None
    lines = [
        f"\n## Beside `{report.comparison.first}`\n",
        "| measure | it | this | loss | 95% | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for m in report.comparison.measures:
        both = [("–" if value is None else f"{value:.4f}") for value in (m.first, m.second)]
        loss = f"{m.loss:+.4f} | {m.low:+.4f} … {m.high:+.4f}"
        lines.append(f"| {m.name} | {both[0]} | {both[1]} | {loss} | {m.verdict} |")
    kinds = sorted({LOSS_UNITS[m.kind] for m in report.comparison.measures})
    lines.append(
        f"\nLosses are {', '.join(kinds)}; asked by `headway eval`'s rules (docs/evals.md)."
    )
    return "\n".join([*lines, ""])
