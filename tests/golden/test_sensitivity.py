"""A gate that cannot tell int8 from int4, or int4 from noise, is no gate: shown on `headway-tiny`.

The embedded model and three copies with rounded weights answer the same 180 questions and expect
the same 60 windows of a book. `docs/text-evals.md` has a table with many more.
"""

from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.evals.statistics import wilson
from headway.evals.text import read_text
from headway.spec.embedded import model_folder
from headway.whole_model import FolderModel
from rounding import ROUNDINGS, write_rounded
from sensitivity import (
    MEMORY,
    Quality,
    Task,
    chance,
    fewer_right,
    judge,
    more_bits,
    more_divergence,
)

QUESTIONS, WINDOWS = 5, 60
NEAR_CHANCE = 0.05
"""int2 may be this share above somebody who always says the same."""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The trained target."""
    try:
        found = model_folder("headway-tiny")
    except HeadwayError as error:
        pytest.skip(str(error))
    if not (found / "config.json").exists():
        pytest.skip(f"headway-tiny is not embedded: there is no model at {found}")
    return found


@pytest.fixture(scope="module")
def judged(
    folder: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Quality]:
    """Everything, judged once: bf16, int8, int4 and int2."""
    scratch = tmp_path_factory.mktemp("rounded")
    task = Task(text=read_text(shared, "books"), windows=WINDOWS, questions=QUESTIONS)
    reference = FolderModel(folder, kv_memory=MEMORY)
    folders = {"bf16": folder} | {
        name: write_rounded(folder, scratch / name, rounding)
        for name, rounding in ROUNDINGS.items()
    }
    return {name: judge(name, place, reference, task) for name, place in folders.items()}


def test_the_model_has_something_to_lose(judged: dict[str, Quality]):
    """Neither at chance nor at 100%: a loss, or a gain, would show."""
    low, high = wilson(sum(judged["bf16"].right), len(judged["bf16"].right))
    assert low > chance(QUESTIONS)
    assert high < 1
    assert judged["bf16"].divergence.kl == 0


def test_int4_is_below_int8(judged: dict[str, Quality]):
    """By divergence and by bits per byte, at one in a hundred."""
    for more in (more_divergence, more_bits):
        found = more(judged["int8"], judged["int4"])
        assert found.mean > 0, found
        assert found.p < 0.01, found


def test_int8_is_not_told_from_bf16(judged: dict[str, Quality]):
    for loss in (more_bits, fewer_right):
        found = loss(judged["bf16"], judged["int8"])
        assert found.low <= 0 <= found.high, found
    assert judged["int8"].divergence.agreement > 0.9


def test_int2_is_near_chance(judged: dict[str, Quality]):
    assert judged["int2"].accuracy <= chance(QUESTIONS) + NEAR_CHANCE
    found = fewer_right(judged["int4"], judged["int2"])
    assert found.mean < 0
    assert found.p < 0.01
