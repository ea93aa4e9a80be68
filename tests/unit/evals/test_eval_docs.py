"""docs/evals.md and docs/skills.md say what is so: commands, examples, exit status, options."""

import re
import shlex
from pathlib import Path

import pytest

from headway.cli.common import GATE_FAILED
from headway.config.options import AgainstOptions, EngineOptions, EvalOptions, read_options
from headway.config.options.against import OF_ONE, PREFIX
from headway.config.options.field import flag_name
from headway.evals import suites
from headway.evals.pairs import (
    ALPHA,
    KL_TOLERANCE,
    KL_TOLERANCE_NARROW,
    NARROW_BITS,
    PERPLEXITY,
    POSITIONS,
    tolerances,
)
from headway.evals.skills.example import TOOL_OPEN
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.evals.tasks.table import TASKS
from headway.evals.texts import read_corpora

DOCS = Path(__file__).resolve().parents[3] / "docs"
EVALS, SKILLS_PAGE = ((DOCS / name).read_text("utf-8") for name in ("evals.md", "skills.md"))
COMMANDS = re.findall(r"^headway eval .*$", EVALS, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_is_understood(line: str):
    _, positionals, _ = read_options(
        [EvalOptions, EngineOptions, AgainstOptions], shlex.split(line)[2:], {}
    )
    assert len(positionals) == 1


def test_the_figures_on_the_page_are_those_of_the_code():
    options = EvalOptions()
    assert len(COMMANDS) == 16
    assert f"exits with **{GATE_FAILED}**" in EVALS and f"{ALPHA:.0%} / *k*" in EVALS
    assert f"`--tolerance` ({options.tolerance})" in EVALS
    assert options.suite == "auto" and options.kl_tolerance is None
    for kl in (KL_TOLERANCE, KL_TOLERANCE_NARROW):
        limits = tolerances(0.02, kl)
        assert (
            f"| {kl:g} | −{100 * limits[POSITIONS]:.0f} points | +{limits[PERPLEXITY]:.1%} |"
            in (EVALS)
        )
    assert f"| {NARROW_BITS} bits a weight or more" in EVALS
    assert (
        f"{suites.PROBE_QUESTIONS} first questions" in EVALS
        and f"fewer than {suites.MIN_PROBE_RIGHT} right" in EVALS
    )
    assert (
        all(f"`{flag_name(name)}`" in EVALS for name in OF_ONE) and f"{flag_name(PREFIX)}" in EVALS
    )
    assert all(f"`{name}`" in EVALS for name in TASKS)
    assert f"`--task-questions` ({options.task_questions})" in EVALS
    assert f"`--windows` ({options.windows})" in EVALS
    assert f"{read_corpora('', options.windows).num_windows} windows" in EVALS
    assert f"`--questions` ({options.questions})" in EVALS
    total = len(SKILLS) * len(LEVELS) * options.questions
    assert f"{total:,} questions" in EVALS


@pytest.mark.parametrize("skill", SKILLS)
def test_the_first_question_of_each_skill_is_on_the_page(skill: str):
    rows = re.findall(rf"^\| `{skill}` \|.*$", SKILLS_PAGE, re.MULTILINE)
    assert len(rows) == 2 and rows[0].count("|") == 6
    first = next(examples(skill, 1, TEST_SEED))
    for line in first.prompt.splitlines()[-1:]:
        assert line in rows[1]
    answer = first.answer.removeprefix(TOOL_OPEN).splitlines()[0]
    assert "pattern" in SKILLS_PAGE if skill == "story" else answer in rows[1]
    assert f"| `{skill}` |" in EVALS
