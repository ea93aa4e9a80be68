"""docs/evals.md and docs/skills.md say what is so: commands, examples, exit status, options."""

import re
import shlex
from pathlib import Path

import pytest

from headway.cli.evaluate import GATE_FAILED
from headway.core.options import EngineOptions, EvalOptions, read_options
from headway.evals.pairs import ALPHA
from headway.evals.skills.example import TOOL_OPEN
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.evals.texts import DIVERGENCE_WINDOWS

DOCS = Path(__file__).resolve().parents[3] / "docs"
EVALS, SKILLS_PAGE = ((DOCS / name).read_text("utf-8") for name in ("evals.md", "skills.md"))
COMMANDS = re.findall(r"^headway eval .*$", EVALS, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_is_understood(line: str):
    _, positionals, _ = read_options([EvalOptions, EngineOptions], shlex.split(line)[2:], {})
    assert len(positionals) == 1


def test_the_figures_on_the_page_are_those_of_the_code():
    options = EvalOptions()
    assert len(COMMANDS) == 6
    assert f"exits with **{GATE_FAILED}**" in EVALS and f"{ALPHA:.0%} / *k*" in EVALS
    assert f"`--tolerance` ({options.tolerance})" in EVALS
    assert f"`--kl-tolerance` ({options.kl_tolerance})" in EVALS
    assert f"`--questions` ({options.questions})" in EVALS
    assert f"{DIVERGENCE_WINDOWS}\nwindows of each text" in EVALS
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
