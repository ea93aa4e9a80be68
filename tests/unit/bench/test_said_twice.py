"""What a report says of its prompts and answers: said twice, and over a cap."""

import pytest

from bench_runs import exchange, run_of
from headway.advise.diagnosis import diagnose
from headway.advise.from_report import reading_from_report
from headway.bench.report import Report, build_report
from headway.bench.table import sharing_lines
from headway.telemetry.wasted import PromptWaste


@pytest.fixture
def report() -> Report:
    """Nine answers of 10 tokens and one of 100; a fifth of each prompt stands twice."""
    sizes = [10] * 9 + [100]
    exchanges = [
        exchange(i, i * 0.1, [i * 0.1 + 0.1 + k * 0.01 for k in range(n)])
        for i, n in enumerate(sizes)
    ]
    found = build_report(run_of(exchanges, 1.0), "0")
    found.prompts = PromptWaste(prompts=10, tokens=1000, twice_tokens=200)
    return found


def test_the_table_tells_what_stands_twice(report):
    [line] = sharing_lines(report)
    assert line.startswith("twice:  20.0% of a prompt stands twice in it (10 prompts)")
    report.prompts = PromptWaste(prompts=10, tokens=1000)
    assert sharing_lines(report) == []


def test_the_doctor_caps_the_answers_of_a_report(report):
    found = diagnose(reading_from_report("r.json", report))
    [cap] = [each for each in found.savings if each.what.startswith("max_tokens")]
    assert cap.what.startswith("max_tokens 19,") and cap.share > 0.2
    assert any("a report keeps no text" in text for text in found.not_known)
