"""Evaluation and gate of a folder that a verb has just written, by the code of `headway eval`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.evaluate import GATE_FAILED, Sources, check_outputs, publish, wants
from headway.config.options import EngineOptions, EvalOptions, GateOptions
from headway.core.errors import UsageError
from headway.evals.pairs import NATS, PERPLEXITY, POINTS, POSITIONS, RELATIVE

if TYPE_CHECKING:
    from headway.cli.main import Call
    from headway.compress.calibration import HeldOut
    from headway.evals.report import Report

__all__ = ["GATE_FAILED", "Figures", "check_gate", "evaluated", "held_out"]


WORDS = {
    POINTS: "a share",
    POSITIONS: "a share of the tokens",
    RELATIVE: "a part of the bits",
    PERPLEXITY: "a part of the perplexity",
    NATS: "nats a token",
}
"""Kind of loss → its unit in a card."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a card says of the quality, in Markdown; whether the gate failed, and the report."""

    markdown: str = ""
    failed: bool = False
    report: "Report | None" = None


def eval_call(call: "Call") -> "Call":
    """The call of `headway eval` that --against and the options beside it stand for."""
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


def sources_of(call: "Call") -> Sources:
    """Return where the reports of the new model and of --against come from."""
    return Sources(call, wants(call.options[EvalOptions]), call.options[EngineOptions])


def check_gate(call: "Call") -> None:
    """UsageError before anything is computed, where the evaluation could not be made."""
    gate: GateOptions = call.options[GateOptions]
    if not gate.against:
        if gate.gate:
            raise UsageError("--gate needs something to compare with.", "--against FOLDER|URL|JSON")
        return
    called = eval_call(call)
    options: EvalOptions = called.options[EvalOptions]
    sources_of(called).check(gate.against, "")
    check_outputs(options)


def held_out(call: "Call") -> "HeldOut":
    """What nothing is calibrated or trained on: the skills' questions, and texts of --eval-data."""
    from headway.compress.calibration import HeldOut

    data = call.options[GateOptions].eval_data
    return HeldOut.of(Path(data) if data else None)


def evaluated(call: "Call", folder: Path, name: str) -> Figures:
    """Evaluate `folder`, print it, and say what a card of `name` needs."""
    if not call.options[GateOptions].against:
        return Figures()
    called = eval_call(call)
    options: EvalOptions = called.options[EvalOptions]
    report = sources_of(called).report(str(folder))
    report.model = name
    status = publish(report, options)
    return Figures(markdown_of(report), status == GATE_FAILED, report)


def markdown_of(report: "Report") -> str:
    """Every measure of both, with its interval and verdict."""
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
    kinds = sorted({WORDS[m.kind] for m in report.comparison.measures})
    lines.append(
        f"\nLosses are {', '.join(kinds)}; asked by `headway eval`'s rules (docs/evals.md)."
    )
    return "\n".join([*lines, ""])
