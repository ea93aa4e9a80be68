"""The report of an evaluation, as `--json` writes it and `--against` reads it.

It contains every item, so that a later run can be compared with it without the model.
"""

import msgspec

from headway.evals.pairs import EvalComparison
from headway.evals.questions import SkillsReport
from headway.evals.texts import DivergenceReport, TextReport
from headway.measure.saved import read_saved

FORMAT = "headway-eval"


class EvalReport(msgspec.Struct, kw_only=True):
    """The evaluation of one model; `place` is its folder or URL. With `--against`: of both models.

    `bits` is bits per weight, None if unknown; `notes` explain what was skipped.
    """

    format: str = FORMAT
    headway: str
    model: str
    place: str
    began: str
    seconds: float
    skills: SkillsReport | None = None
    tasks: SkillsReport | None = None
    text: TextReport | None = None
    divergence: DivergenceReport | None = None
    comparison: EvalComparison | None = None
    bits: float | None = None
    notes: list[str] = []
    against: "EvalReport | None" = None


def read_report(path: str) -> EvalReport:
    """Read a report written by --json; raises UsageError that names what is wrong with the file."""
    return read_saved(path, EvalReport, "eval")
