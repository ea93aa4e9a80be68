"""`choosing.py` replays what was recorded, whatever is guessed, and counts what that takes."""

import argparse
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import choosing


def recorded(streams: int) -> list[choosing.Answer]:
    """Answers that repeat some of their prompts."""
    rng = random.Random(1)
    answers = []
    for _ in range(streams):
        prompt = [rng.randrange(500) for _ in range(40)]
        begin = rng.randrange(20)
        answer = [rng.randrange(500), *prompt[begin : begin + 15], rng.randrange(500)]
        answers.append(choosing.Answer(prompt, answer))
    return answers


@pytest.mark.parametrize("machine", choosing.MACHINES)
def test_the_answers_are_those_that_were_recorded(machine: str):
    answers = recorded(4)
    meter = choosing.Meter(counts_calls=True)
    replay = choosing.Replay(answers, 3, machine, meter)
    came: dict[int, list[int]] = {}
    for _ in range(60):
        replay.step()
        for sequence, _ in replay.running:
            came[sequence.sequence_id] = sequence.tokens[sequence.num_prompt :]
    assert len(came) > 8
    for number, tokens in came.items():
        assert tokens == answers[number % 4].answer[: len(tokens)]
    spent = replay.spent
    assert sum(spent.steps) == 60 and sum(spent.rows) == 180
    assert spent.tokens >= 180 and spent.a_step > 0


def test_a_table_has_a_row_for_each_cell():
    given = argparse.Namespace(
        machines=["cheap"],
        kinds=["copies"],
        streams=[1, 2],
        repeats=1,
        calls=True,
        steps=20,
        skipped=2,
    )
    rows = [*choosing.measure(given, {"copies": recorded(3)})]
    assert [row[:3] for row in rows] == [["cheap", "copies", 1], ["cheap", "copies", 2]]
    assert all(float(row[4]) > 0 for row in rows)
    assert float(rows[0][7]) > 1.5, "copies bring several tokens a step where rows are cheap"
