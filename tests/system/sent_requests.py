"""What a load generator sent, in the order of its plan."""

from typing import Any

from headway.bench.report import BenchReport
from headway.bench.traces import TraceRow


def sent_as(rows: list[TraceRow], report: BenchReport, truth: list[dict[str, Any]]) -> None:
    """What the server got is the trace: lengths in their order, gaps in their distribution."""
    exchanges = sorted(report.run.exchanges, key=lambda x: x.id)
    expected = [(row.prompt_tokens, row.output_tokens) for row in rows[: len(exchanges)]]
    assert [(x.asked_prompt_tokens, x.asked_output_tokens) for x in exchanges] == expected
    assert sorted((t["prompt_tokens"], t["max_tokens"]) for t in truth) == sorted(
        pair for pair in expected if pair[1] > 2
    ), "the fake takes answers of up to two tokens for probes"
