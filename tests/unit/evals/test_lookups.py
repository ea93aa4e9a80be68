"""Lookups at distances: what they ask, and how they are counted."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from headway.cli.evaluate import outline
from headway.evals import questions
from headway.evals.skills.suite import (
    TEST_SEED,
    lookups,
)
from headway.evals.suites import EvalSettings

Chat = list[dict[str, str]]


class Answers:
    """A model that knows the answers of some skills, and says "no" to all else."""

    name = "answers"

    def __init__(self, right: dict[str, str]) -> None:
        self._right = right
        self.asked: list[str] = []

    def generate(self, chats: Sequence[Chat], *, max_tokens: int) -> list[str | None]:
        self.asked += [chat[-1]["content"] for chat in chats]
        return [self._right.get(chat[-1]["content"], "no") for chat in chats]

    def score(self, texts: Sequence[str], *, top: int = 0) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("distance", [0, 300, 800])
def test_lookups_stand_so_far_from_their_list(distance: int):
    """16 pairs, stories of at most that length, then the question: its answer is in the list."""
    tested = list(islice(lookups(distance, TEST_SEED), 20))
    assert tested == list(islice(lookups(distance, TEST_SEED), 20))
    for one in tested:
        assert one.before == () and one.prompt.split("\n")[0].count(":") in (16, 17)
        told, _, stories = one.prompt.rpartition("\n")[0].partition("\n\n")
        assert len(stories) <= distance and (len(stories) > distance * 0.5) == bool(distance)
        key, number = one.answer.removeprefix("Found ").split(": ")
        assert f"{key}: {number}" in told and key in one.prompt.rpartition("\n")[2].lower()


def test_lookups_are_rows_of_their_own_as_many_as_a_skill_has():
    wanted = EvalSettings(
        skills=["copy"], levels=[1, 2], questions=3, seed=5, corpora=None, distances=[0, 300]
    )
    assert wanted.num_questions == 18 and "lookups at 0, 300 characters" in outline(wanted)
    model = Answers({one.prompt: one.answer for one in islice(lookups(300, 5), 6)})
    found = questions.ask(
        model, skills=["copy"], levels=[1, 2], questions=3, seed=5, distances=[0, 300]
    )
    shares = {(each.skill, each.level): (each.right, each.total) for each in found.shares}
    assert shares["lookup at 300", 0] == (6, 6) and shares["lookup at 0", 0] == (0, 6)
    assert shares["copy", 0] == (0, 6) and shares["", 0] == (6, 18)
