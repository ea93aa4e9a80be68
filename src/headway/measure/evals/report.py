"""The report of an evaluation, as `--json` writes it and `--against` reads it.

It is given what the suites found. It promises every item, so that a later run can be paired with
this one without asking the model again.
"""

from pathlib import Path

import msgspec

from headway.core.errors import UsageError
from headway.measure.evals.pairs import Comparison
from headway.measure.evals.skills import SkillsReport
from headway.measure.evals.texts import DivergenceReport, TextReport

FORMAT = "headway-eval"


class Report(msgspec.Struct, kw_only=True):
    """One model's evaluation; `place` is its folder or URL. With `--against`, the other's too."""

    format: str = FORMAT
    headway: str
    model: str
    place: str
    began: str
    seconds: float
    skills: SkillsReport | None = None
    text: TextReport | None = None
    divergence: DivergenceReport | None = None
    comparison: Comparison | None = None
    against: "Report | None" = None


def read_report(path: str) -> Report:
    """A report that --json wrote; UsageError names what is wrong with the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no report of headway eval: {error}.", "Write one with --json."
        ) from error
    if report.format != FORMAT:
        raise UsageError(f"{path} is a {report.format}, no report of headway eval.")
    return report
