"""`headway gateway calibrate GATEWAY.yaml`: where the cheap route of a cascade is good enough."""

import asyncio
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.config.options import CalibrateOptions, GatewayOptions
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.core.regular_file import read_bytes

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.gateway.cascade.calibrate import CalibrationQuestion
    from headway.gateway.cascade.evidence import EvidenceFile
    from headway.gateway.config import Config, GatewayModelRow


class SuiteLine(msgspec.Struct, kw_only=True):
    """One line of a suite: a question, and the right `answer` or a `pattern` of it."""

    task: str
    messages: list[dict[str, Any]]
    answer: str | None = None
    pattern: str | None = None
    max_tokens: int = 256


def calibrate(call: "VerbCall") -> int:
    """Ask both routes, judge the answers, write the evidence; return 0."""
    from headway.gateway.cascade.rows import evidence_path
    from headway.gateway.config import read_config

    options: CalibrateOptions = call.options[CalibrateOptions]
    if len(call.positionals) != 1:
        raise UsageError(
            "calibrate takes the gateway's file.", "headway gateway calibrate gateway.yaml"
        )
    file = Path(call.positionals[0])
    config = read_config(file)
    row = cascade_row(config, options.model)
    questions = list(suite_questions(options))
    if not questions:
        raise UsageError(f"{options.suite} has no question.", "Give a line for each.")
    assert row.cascade is not None
    path = evidence_path(row.cascade, file)
    if "--dry-run" in call.switches:
        tasks = sorted({question.task for question in questions})
        print(f"{len(questions)} questions of {', '.join(tasks)}, to {row.name}; writes {path}")
        return 0
    with items_bar(f"{row.name} and {row.cascade.cheap}", len(questions)) as advance:
        evidence = asyncio.run(collect_evidence(config, row, questions, options, advance))
    write_evidence(path, evidence)
    print_evidence(evidence, path)
    return 0


def cascade_row(config: "Config", name: str) -> "GatewayModelRow":
    """Return the model row of that name, or the only one with a cascade."""
    rows = [row for row in config.models if row.cascade is not None and name in ("", row.name)]
    if len(rows) != 1:
        there = ", ".join(row.name for row in config.models if row.cascade is not None) or "none"
        raise UsageError(f"Which cascade? There is {there}.", "Say --model NAME.")
    return rows[0]


def suite_questions(options: CalibrateOptions) -> "Iterator[CalibrationQuestion]":
    """Yield the questions that the options name."""
    from headway.gateway.cascade.calibrate import CalibrationQuestion

    if options.suite == "skills":
        from headway.evals.questions import MAX_TOKENS, OTHER_TOKENS, check_skills
        from headway.evals.skills.suite import LEVELS, examples

        for skill in check_skills(options.skills):
            for level in sorted(set(options.levels)) or LEVELS:
                stream = examples(skill, level, options.test_seed)
                for one in islice(stream, options.questions):
                    yield CalibrationQuestion(
                        task=skill,
                        messages=one.messages,
                        max_tokens=MAX_TOKENS.get(skill, OTHER_TOKENS),
                        accepts=one.accepts,
                    )
        return
    for number, line in enumerate(read_lines(options.suite), 1):
        yield parse_question(f"{options.suite}:{number}", line)


def read_lines(path: str) -> list[bytes]:
    """Return the non-empty lines of a suite."""
    try:
        return [line for line in read_bytes(Path(path)).splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"--suite {path}: {error.strerror}.", "skills, or a file.") from error


def parse_question(where: str, line: bytes) -> "CalibrationQuestion":
    """Parse one line of a suite; UsageError says what is wrong with it."""
    from headway.gateway.cascade.calibrate import CalibrationQuestion

    how = '{"task": "t", "messages": [{"role": "user", "content": "…"}], "answer": "…"}'
    try:
        row = msgspec.json.decode(line, type=SuiteLine)
        pattern = re.compile(row.pattern, re.DOTALL) if row.pattern is not None else None
    except (msgspec.MsgspecError, re.error) as error:
        raise UsageError(f"{where}: {str(error)[:200]}.", how) from error
    if (row.answer is None) == (row.pattern is None):
        raise UsageError(f"{where}: say either answer or pattern.", how)

    def accepts(text: str) -> bool:
        if pattern is not None:
            return pattern.fullmatch(text.strip()) is not None
        return text.strip() == (row.answer or "").strip()

    return CalibrationQuestion(
        task=row.task, messages=row.messages, max_tokens=row.max_tokens, accepts=accepts
    )


async def collect_evidence(
    config: "Config",
    row: "GatewayModelRow",
    questions: "list[CalibrationQuestion]",
    options: CalibrateOptions,
    advance: Any,
) -> "EvidenceFile":
    """Return the evidence, from upstreams that this process asks itself."""
    from headway.gateway.cascade.calibrate import CascadeCalibration
    from headway.gateway.state import GatewayState

    state = GatewayState(options=GatewayOptions(), config=config)
    try:
        await asyncio.gather(*(each.check_health() for each in state.upstreams.values()))
        return await CascadeCalibration(state, row, options.concurrency).run(
            questions, tolerance=options.tolerance, alpha=options.alpha, advance=advance
        )
    finally:
        await state.stop()


def write_evidence(path: Path, evidence: "EvidenceFile") -> None:
    """Write the evidence atomically."""
    data = msgspec.json.format(msgspec.json.encode(evidence), indent=1)
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(data + b"\n")
        os.replace(new, path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Is the folder there?") from error


def print_evidence(evidence: "EvidenceFile", path: Path) -> None:
    """Print a line for each task: what both get right, what the cascade loses and saves."""
    print("task              cheap    dear    check          accepted  lost  loss below  cost")
    for each in evidence.tasks:
        check = each.check or "valid, whole"
        check += f" {each.least:.2f}" if each.least is not None else ""
        saved = f"{each.cost / each.dear_cost:.0%}" if each.dear_cost else "–"
        way = f"{check:<14} {each.accepted:>8} {each.lost:>5} {each.loss_high:>11.1%}  {saved}"
        shares = f"{each.cheap_right / each.asked:>7.1%} {each.dear_right / each.asked:>7.1%}"
        print(f"{each.task:<15} {shares}    {way if each.use else 'dear: ' + each.why}")
    print(f"{path} is written; SIGHUP makes a running gateway read it.")
