"""What windows are measured on, and lookups at distances: the same question never on both sides."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headway.cli.evaluate import outline
from headway.cli.gated import Figures
from headway.cli.main import Call
from headway.cli.narrow import completed, gate_lines, layers_of, told
from headway.core.embedded import model_folder
from headway.core.errors import UsageError
from headway.core.options import EngineOptions, GateOptions, NarrowOptions, read_options
from headway.evals import questions
from headway.evals.narrowing import Found, Layers, Losses, Lost, rows_of, text_rows
from headway.evals.skills.suite import (
    LEVELS,
    SKILLS,
    TEST_SEED,
    examples,
    lookups,
    untested_examples,
)
from headway.evals.suites import Wanted

Chat = list[dict[str, str]]
TINY = model_folder(None)


class Answers:
    """A model that knows the answers of some skills, and says "no" to all else."""

    name = "answers"

    def __init__(self, right: dict[str, str]) -> None:
        self._right = right
        self.asked: list[str] = []

    def generate(self, chats: Sequence[Chat], *, max_tokens: int) -> list[str | None]:
        self.asked += [chat[-1]["content"] for chat in chats]
        return [self._right.get(chat[-1]["content"], "no") for chat in chats]

    def answer_ids(
        self, chats: Sequence[Chat], *, max_tokens: int
    ) -> list[tuple[list[int], list[int], str] | None]:
        replies = self.generate(chats, max_tokens=max_tokens)
        return [([1, 2, 3], [4, 5], reply or "") for reply in replies]

    def score(self, texts: Sequence[str], *, top: int = 0) -> Any:
        raise NotImplementedError


def call(*arguments: str) -> Call:
    options, positionals, sources = read_options(
        (NarrowOptions, GateOptions, EngineOptions), ["F", "OUT", *arguments], {}
    )
    return Call(options=options, positionals=positionals, sources=sources, switches=frozenset())


def test_rows_are_right_answers_with_the_place_where_they_begin():
    """A model that can copy alone is measured on copies alone."""
    copies = [one for level in LEVELS for one in islice(untested_examples("copy", level, 1), 2)]
    model = Answers({one.prompt: one.answer for one in copies})
    rows = list(rows_of(model, 2, (300,)))
    assert [row.kind for row in rows] == ["copy"] * 6
    assert all(row.token_ids == [1, 2, 3, 4, 5] and row.begin == 3 for row in rows)
    assert len(model.asked) == 2 * 3 * len(SKILLS) + 6


def test_texts_are_judged_from_their_second_token_on():
    (row,) = text_rows([[7, 8, 9], [7], []])
    assert (row.kind, row.token_ids, row.begin) == ("text", [7, 8, 9], 1)


@pytest.mark.parametrize("skill", SKILLS)
def test_what_is_measured_is_never_asked(skill: str):
    tested = {one.asked for one in islice(examples(skill, 1, TEST_SEED), 40)}
    measured = {one.asked for one in islice(untested_examples(skill, 1, 1), 40)}
    assert tested and measured and not tested & measured


@pytest.mark.parametrize("distance", [0, 300, 800])
def test_lookups_stand_so_far_from_their_list(distance: int):
    """16 pairs, stories of at most that length, then the question: its answer is in the list."""
    tested = list(islice(lookups(distance, TEST_SEED), 20))
    assert tested == list(islice(lookups(distance, TEST_SEED), 20))
    assert not {one.asked for one in islice(lookups(distance, TEST_SEED, tested=False), 40)} & {
        one.asked for one in tested
    }
    for one in tested:
        assert one.before == () and one.prompt.split("\n")[0].count(":") in (16, 17)
        told, _, stories = one.prompt.rpartition("\n")[0].partition("\n\n")
        assert len(stories) <= distance and (len(stories) > distance * 0.5) == bool(distance)
        key, number = one.answer.removeprefix("Found ").split(": ")
        assert f"{key}: {number}" in told and key in one.prompt.rpartition("\n")[2].lower()


def test_lookups_are_rows_of_their_own_as_many_as_a_skill_has():
    wanted = Wanted(
        skills=["copy"], levels=[1, 2], questions=3, seed=5, corpora=None, distances=[0, 300]
    )
    assert wanted.num_questions == 18 and "lookups at 0, 300 characters" in outline(wanted)
    model = Answers({one.prompt: one.answer for one in islice(lookups(300, 5), 6)})
    found = questions.ask(
        model, skills=["copy"], levels=[1, 2], questions=3, seed=5, distances=[0, 300]
    )
    shares = {(each.skill, each.level): (each.right, each.asked) for each in found.shares}
    assert shares["lookup at 300", 0] == (6, 6) and shares["lookup at 0", 0] == (0, 6)
    assert shares["copy", 0] == (0, 6) and shares["", 0] == (6, 18)


def test_the_gate_compares_with_the_whole_folder_where_nothing_is_named():
    gate = completed(call("--gate"), Path("F")).options[GateOptions]
    assert gate.against == "F" and gate.distances == [0, 300, 800]
    gate = completed(call("--gate", "--against=a.json", "--distances=9"), Path("F")).options[
        GateOptions
    ]
    assert gate.against == "a.json" and gate.distances == [9]
    assert completed(call(), Path("F")).options[GateOptions].against == ""


def test_a_share_is_of_what_the_model_sees_at_the_context():
    found = layers_of(call("--candidates=64,32,64"), TINY)
    assert found.seen == (2048,) * 6 and found.candidates == (32, 64)
    assert layers_of(call("--max-model-len=512"), TINY).seen == (512,) * 6
    assert layers_of(call("--context=100"), TINY).choices(0) == [64]
    with pytest.raises(UsageError, match="the model sees 512 tokens"):
        layers_of(call("--context=600", "--max-model-len=512"), TINY)


def test_the_file_tells_what_was_measured_and_that_nobody_judged_it():
    found = Found(
        windows=(8, 0),
        lost=Losses(kinds={"copy": Lost(0.0125, 1, 9)}),
        alone=[{0: 0.0, 8: 0.25}, {0: 0.0, 8: 1.5}],
    )
    lines = told(Layers(seen=(32, 32), sinks=4, candidates=(8,), judged=30), found)
    assert "less than 30 tokens" in lines[0]
    assert lines[2].split() == ["0", "8", "8:", "0.2500"]
    assert lines[3].split() == ["1", "whole", "8:", "1.5000"]
    assert "44 of 64 layer-tokens at a context of 32, a share of 0.688" in lines[4]
    assert lines[5].split()[:2] == ["copy", "+0.0125"] and lines[5].endswith("1 of 9 changed")
    assert gate_lines(Figures()) == ["not evaluated: --gate does"]
