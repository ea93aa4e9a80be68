"""How many engines the traffic asks for: by what prompts take, and by the pace of answers."""

import pytest

from headway.core.clock import VirtualClock
from headway.core.service import service_classes
from headway.perf.model import StepModel, Work
from headway.telemetry.engines import DEFAULT_TPOT_S, EngineDemand, promised_tpot_s
from telemetry_cases import decoded

TPOT_S = 0.02


@pytest.fixture(scope="module")
def model() -> StepModel:
    """A model of engines whose steps take 8 ms and 0.1 ms a row: 120 rows keep 20 ms."""
    made = StepModel()
    for rows in [1, 10, 30, 60, 90, 110, 130] * 60:
        made.learn(Work(rows, rows, 0, 0), 0.008 + 0.0001 * rows)
    return made


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def demand(clock) -> EngineDemand:
    return EngineDemand(clock, lambda: TPOT_S)


def run(demand, clock, model, seconds: float, *, prefill: float, decode: float) -> None:
    for _ in range(round(10 * seconds)):
        clock.advance(0.1)
        if prefill:
            demand.on_record(decoded(0.1 * prefill, prefill=1000), model)
        for _ in range(round(10 * decode)):
            demand.on_record(decoded(0.014, rows=60), model)


def test_what_is_asked_is_told_in_engines(demand, clock, model):
    """An engine makes 6,000 tokens/s at this pace, and 600 in a tenth of a second."""
    run(demand, clock, model, 60, prefill=0.5, decode=0.8)
    assert demand.engines_needed == pytest.approx((0.5, 0.8), rel=0.1)


def test_a_lonely_answer_asks_for_little_though_its_engine_is_always_busy(demand, clock, model):
    for _ in range(5000):
        clock.advance(0.0081)
        demand.on_record(decoded(0.0081, rows=1), model)
    assert demand.engines_needed[1] < 0.03


def test_a_prompt_beside_answers_counts_as_what_it_added(demand, clock, model):
    clock.advance(1.0)
    demand.on_record(decoded(0.1, prefill=500, rows=20), model)
    assert demand.engines_needed[0] == pytest.approx(0.09, rel=0.05)


def test_a_pace_that_no_step_keeps_asks_for_an_engine_for_each_row(clock, model):
    demand = EngineDemand(clock, lambda: 0.001)
    clock.advance(0.01)
    demand.on_record(decoded(0.0083, rows=3), model)
    assert demand.engines_needed[1] == pytest.approx(3 * 0.001 / 0.01)


def test_longer_contexts_leave_room_for_fewer_rows(clock):
    """8 ms and 0.1 ms a row: 120 rows keep 20 ms, and 60 that take as long again for contexts."""
    model = StepModel()
    for rows in [1, 10, 30, 60, 90, 110, 130] * 100:
        for context in (0, 1000):
            read = rows * context
            model.learn(Work(rows, rows, 0, read), 0.008 + 1e-4 * rows + 1e-7 * read)
    for context, rows in ((0, 120), (1000, 60)):
        demand = EngineDemand(clock, lambda: TPOT_S)
        clock.advance(1.0)
        step = decoded(0.01, rows=10)
        step.kv_tokens_read = (10 * context,)
        demand.on_record(step, model)
        assert demand.engines_needed[1] == pytest.approx(10 * TPOT_S / rows, rel=0.15)


def test_before_a_model_is_known_answers_ask_for_next_to_nothing(demand, clock):
    clock.advance(1.0)
    demand.on_record(decoded(0.1, prefill=500, rows=20), None)
    assert demand.engines_needed == pytest.approx((0.1, 20 * TPOT_S / 4096))


def test_what_nobody_asks_any_more_is_forgotten(demand, clock, model):
    run(demand, clock, model, 60, prefill=0.5, decode=0.8)
    clock.advance(200.0)
    assert max(demand.engines_needed) < 0.01


def test_nothing_is_asked_before_anything_ran(clock):
    assert EngineDemand(clock, lambda: TPOT_S).engines_needed == (0.0, 0.0)


def test_the_pace_is_that_of_the_default_class():
    assert promised_tpot_s(service_classes(["ttft=1s,tpot=40ms"])) == 0.04
    assert promised_tpot_s(service_classes(["ttft=1s"])) == DEFAULT_TPOT_S
