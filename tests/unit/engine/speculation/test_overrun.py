"""What steps with guesses take beyond what is foretold, and what that keeps from being guessed."""

import random

import pytest

from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, Work
from headway.engine.speculation.candidates import Candidate
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.overrun import Overrun
from headway.engine.speculation.speculation import Speculation
from headway.telemetry.records import StepRecord
from telemetry_cases import step


def record(times: float, *, drafts: int = 0, draft_s: float = 0.0) -> StepRecord:
    """A step that took `times` as long as foretold, and choosing and the drafter besides."""
    return step(
        predicted_s=0.06,
        choose_s=0.002,
        draft_s=draft_s,
        num_drafts=drafts,
        schedule_s=0.002,
        execute_s=times * 0.06 + draft_s - 0.002,
        update_s=0.001,
        gap_s=0.001,
    )


def test_it_is_what_guesses_make_a_step_longer_by() -> None:
    """A machine that is slow in all steps is not blamed on guesses."""
    overrun, rng = Overrun(), random.Random(3)
    for _ in range(300):
        noise = rng.uniform(0.97, 1.03)
        overrun.saw(record(1.2 * noise))
        overrun.saw(record(1.2 * 1.08 * noise, drafts=20, draft_s=0.004))
    assert overrun.share == pytest.approx(0.08, abs=0.02)


def test_steps_that_are_shorter_than_foretold_are_no_credit() -> None:
    overrun = Overrun()
    for _ in range(100):
        overrun.saw(record(0.8, drafts=3))
    assert overrun.share == 0.0


def test_a_step_that_was_not_foretold_tells_nothing() -> None:
    overrun, made = Overrun(), record(3.0, drafts=3)
    before = overrun.share
    made.predicted_s = 0.0
    overrun.saw(made)
    assert overrun.share == before


def test_guesses_are_worth_less_where_such_steps_overrun() -> None:
    """32 sequences with a guess each that is kept: so much less as the overrun takes."""
    speculation = Speculation(SpeculationConfig(sources=("lookup",)), StepCost())
    alone = Work(32, 32, 3200, 3200)
    plain = PlainStep([100] * 32, alone, alone, 99)
    best, counts = [Candidate(Drafts([7], "lookup", 9), [1.0], [1.0])] * 32, [1] * 32
    before_s, step_s = speculation._saved_s(best, counts, plain)
    begun = speculation.overrun.share
    for _ in range(200):
        speculation.timed(record(1.1, drafts=32))
    after_s, _ = speculation._saved_s(best, counts, plain)
    assert before_s - after_s == pytest.approx((0.1 - begun) * step_s, rel=0.01)
