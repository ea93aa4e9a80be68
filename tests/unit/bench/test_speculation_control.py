"""What `speculation_control.py` says follows from the cells it keeps; here they are made up."""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import speculation_control as control
from headway import LLM
from headway.config.speculation_config import SpeculationConfig
from headway.engine.speculation.controller import PlainStep
from headway.perf.model import StepModel
from headway.spec.embedded import model_folder
from lanes import Mark, Prompt, Track


def mark(seconds: float, tokens: int) -> Mark:
    return Mark(seconds, tokens, rows=1, guessed=0, kept=0, draft_s=0.0)


def test_seconds_are_read_at_tokens_between_steps():
    marks = [mark(1.0, 4), mark(3.0, 2)]
    assert control.at_tokens(marks, np.array([0, 2, 4, 5, 6])).tolist() == [0, 0.5, 1, 2.5, 4]


def test_each_lane_learns_what_its_own_steps_take():
    """One whose cost stays as it was at the start measures a controller that nobody runs."""
    llm = LLM(model_folder("headway-tiny"), max_model_len=256, max_num_seqs=16, policy="fcfs")
    track = Track(llm, (Prompt("chats", [n + 5] * 20, 0.0) for n in range(64)))
    first, second = track.add("off", None), track.add("off again", None)
    known, before = second.cost.num_observed, first.cost.parts
    track.fill(first, 2)
    for _ in range(12):
        track.step(first)
    assert first.cost.num_observed > known and first.cost.parts != before
    assert second.cost.num_observed == known and second.cost.parts == before
    track.end()


def lane(seconds: float, tokens: int = 100) -> dict[str, object]:
    """A lane that took so long for so many tokens, evenly."""
    told = {"seconds": [seconds / control.PARTS] * control.PARTS, "tokens": tokens}
    return told | {"x_off": 12 / seconds, "guessed": 4, "kept": 2, "rows": 2}


def test_regret_is_against_the_best_choice_that_went_on():
    """One that was ended early had other tokens, fewer and perhaps easier."""
    lanes = {"off": lane(12), "auto": lane(10), "draft 2": lane(8), "lookup 2": lane(1, 20)}
    cell = {"streams": 4, "kind": "chats", "tokens": 100, "same": True, "lanes": lanes}
    text = control.regret_table([cell])
    assert "| 4 | chats | 1.20 | 1.50 | 12.00 |" in control.rates_table([cell])
    assert "| 1.20 | draft 2: 1.50 | +20.0% (+20.0 to +20.0) | +20% | 2.00, 50% | yes |" in text


def test_all_guesses_are_taken_as_far_as_they_fit():
    assert control.all_of([[0.5, 0.4], [], [0.1]], 8) == [2, 0, 1]
    assert control.all_of([[0.5, 0.4], [], [0.1]], 2) == [2, 0, 0]
    plain = PlainStep([5], None, None, 1)
    always = control.Always(SpeculationConfig(sources=("lookup",)), StepModel())
    assert always._choose_to_draft([[0.1, 0.1]], plain) == [1]
