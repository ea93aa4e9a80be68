"""Rows of calibration: by share, in the template, and never what an evaluation tests."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headway.compress.calibration import (
    CalibrationSource,
    HeldOut,
    parse_sources,
    read_calibration,
    text_rows,
)
from headway.compress.train.run import identity
from headway.core.errors import UsageError
from headway.evals.skills.suite import TEST_SEED, examples
from headway.evals.text import read_data

PASSAGE = "The quick brown fox jumps over the lazy dog and runs along the river until it is dark"


class Words:
    """A token for each word; a chat begins each turn with 0 and the answer with 1."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [2 + len(word) for word in text.split()]

    def chat_ids(self, messages: list[dict[str, Any]], /) -> list[int]:
        return [i for turn in messages for i in (0, *self.encode(turn["content"]))] + [1]


def rows(
    sources: list[CalibrationSource], tested: HeldOut | None = None, **options: Any
) -> list[list[int]]:
    given = {"rows": 8, "length": 64, "seed": 0, **options}
    return read_calibration(sources, Words(), tested=tested or HeldOut(), **given).rows


def text_file(folder: Path, words: int = 4000) -> str:
    path = folder / "books.txt"
    path.write_text(" ".join("abcdefgh"[: 1 + at % 8] for at in range(words)))
    return str(path)


def test_rows_are_by_share_and_the_same_for_a_seed(tmp_path: Path):
    sources = parse_sources([f"{text_file(tmp_path)}:0.75", "skills:0.25"])
    first = rows(sources)
    assert [len(row) for row in first] == [64] * 8
    assert all(0 not in row for row in first[:6])
    assert all({0, 1} & set(row) for row in first[6:])  # turns of chats
    assert first == rows(sources)
    assert first != rows(sources, seed=1)


def test_chats_are_in_their_template_with_their_answer(tmp_path: Path):
    path = tmp_path / "traffic.jsonl"
    chat = [{"role": "user", "content": "a bb"}, {"role": "assistant", "content": "ccc"}]
    lines = [
        {"messages": chat},
        {"custom_id": "1", "body": {"messages": chat}},
        {"conversations": [{"from": "human", "value": "a bb"}, {"from": "gpt", "value": "ccc"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert rows([CalibrationSource(name=str(path))], length=5, rows=3) == [[0, 3, 4, 1, 5]] * 3
    path.write_text(json.dumps({"prompt": "a bb ccc"}))
    assert rows([CalibrationSource(name=str(path))], rows=1) == [[3, 4, 5]]


@pytest.mark.parametrize("line", ['{"text": 1}', "[]", '{"prompt": 7}', "{", '{"messages": [1]}'])
def test_a_line_that_is_no_request_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "traffic.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match="a line is no request"):
        rows([CalibrationSource(name=str(path))])


def test_passages_of_an_evaluation_are_refused(tmp_path: Path):
    """Thirteen words in a row, whatever their case and what stands between."""
    data = tmp_path / "data" / "text"
    data.mkdir(parents=True)
    (data / "val.txt").write_text(f"Before it. {PASSAGE}. After it.")
    tested = HeldOut.of(tmp_path / "data")
    copy = tmp_path / "copy.txt"
    copy.write_text(f"Something else, then: {PASSAGE.upper().replace(' ', ', ')}!")
    with pytest.raises(UsageError, match="an evaluation tests"):
        rows([CalibrationSource(name=str(copy))], tested, rows=1, length=64)
    copy.write_text("Something else: the quick brown fox jumps over the lazy dog and sleeps there")
    assert rows([CalibrationSource(name=str(copy))], tested, rows=1)
    with pytest.raises(UsageError, match="what an evaluation tests"):
        rows([CalibrationSource(name=str(data / "val.txt"))])


def test_questions_of_an_evaluation_are_refused(tmp_path: Path):
    """The first hundred of each skill and level, with the seed of `headway eval`."""
    tested = HeldOut.of(None)
    path = tmp_path / "traffic.jsonl"
    for skill, level in (("recall", 2), ("tool", 1), ("sort", 3)):
        asked = next(islice(examples(skill, level, TEST_SEED), 99, None)).messages
        path.write_text(json.dumps({"messages": asked}))
        with pytest.raises(UsageError, match="a question of an evaluation"):
            rows([CalibrationSource(name=str(path))], tested)
    other = next(examples("sort", 3, TEST_SEED + 5)).messages
    path.write_text(json.dumps({"messages": other}))
    assert rows([CalibrationSource(name=str(path))], tested)


def test_sources_that_are_not_there_are_refused(tmp_path: Path):
    for given in ("missing.txt", "skills:0", "skills:-1"):
        with pytest.raises(UsageError, match=r"--calibrate"):
            parse_sources([given])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError, match="holds no row"):
        rows([CalibrationSource(name=str(tmp_path / "empty.txt"))])


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_text_is_named(tmp_path: Path) -> None:
    """It would keep its reader for ever: of a calibration text, a test text and weights."""
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a FIFO, not a regular file"):
        next(text_rows(pipe, Words(), 8, 1, HeldOut()))
    with pytest.raises(UsageError, match="a FIFO, not a regular file"):
        read_data(pipe)
    with pytest.raises(OSError, match="a FIFO, not a regular file"):
        identity(tmp_path)
