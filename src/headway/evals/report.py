"""The report of an evaluation, as `--json` writes it and `--against` reads it.

It is given what the suites found. It promises every item, so that a later run can be paired with
this one without asking the model again.
"""

import msgspec

from headway.evals.pairs import Comparison
from headway.evals.questions import SkillsReport
from headway.evals.texts import DivergenceReport, TextReport
from headway.measure.saved import read_saved

FORMAT = "headway-eval"


class Report(msgspec.Struct, kw_only=True):
    """One model's evaluation; `place` is its folder or URL. With `--against`, the other's too.

    `bits` are held for a weight, None where that is not told; `notes` say what was not asked, why.
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
    comparison: Comparison | None = None
    bits: float | None = None
    notes: list[str] = []
    against: "Report | None" = None


def read_report(path: str) -> Report:
    """A report that --json wrote; UsageError names what is wrong with the file."""
    return read_saved(path, Report, "eval")
