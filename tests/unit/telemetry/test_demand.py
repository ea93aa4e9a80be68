"""How many engines the traffic asks for: by what prompts take, and by the pace of answers."""

import pytest

from headway.core.clock import VirtualClock
from headway.core.service import service_classes
from headway.telemetry.demand import USUAL_TPOT_S, DecodeSteps, Demand, promised_s
from telemetry_cases import decoded

TPOT_S = 0.02


def test_a_line_through_the_steps_tells_how_many_rows_keep_the_pace():
    steps = DecodeSteps()
    assert (steps.seconds(5), steps.rows_at(TPOT_S)) == (0.0, 4096)
    for rows in [1, 30, 60, 90] * 20:
        steps.observe(rows, 0.008 + 0.0001 * rows)
    assert steps.line == pytest.approx((0.008, 0.0001), rel=0.02)
    assert steps.rows_at(TPOT_S) == pytest.approx(120, rel=0.02)
    assert steps.rows_at(0.001) == 1
    assert steps.seconds(0) == 0.0


def test_steps_of_one_size_alone_leave_a_share_to_the_rows():
    steps = DecodeSteps()
    for _ in range(20):
        steps.observe(10, 0.010)
    assert steps.seconds(10) == pytest.approx(0.010)
    assert steps.rows_at(0.020) == pytest.approx(60)  # (20 - 8) / 0.2


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def demand(clock) -> Demand:
    """Of engines whose steps take 8 ms and 0.1 ms a row: 120 rows keep 20 ms."""
    made = Demand(clock, lambda: TPOT_S)
    for rows in [10, 50] * 10:
        made.on_record(decoded(0.008 + 0.0001 * rows, rows=rows))
    return made


def run(demand, clock, seconds: float, *, prefill: float, decode: float) -> None:
    for _ in range(round(10 * seconds)):
        clock.advance(0.1)
        if prefill:
            demand.on_record(decoded(0.1 * prefill, prefill=1000))
        for _ in range(round(10 * decode)):
            demand.on_record(decoded(0.014, rows=60))


def test_what_is_asked_is_told_in_engines(demand, clock):
    """An engine makes 6,000 tokens/s at this pace, and 600 in a tenth of a second."""
    run(demand, clock, 60, prefill=0.5, decode=0.8)
    assert demand.asked == pytest.approx((0.5, 0.8), rel=0.1)


def test_a_lonely_answer_asks_for_little_though_its_engine_is_always_busy(demand, clock):
    for _ in range(5000):
        clock.advance(0.0081)
        demand.on_record(decoded(0.0081, rows=1))
    assert demand.asked[1] < 0.03


def test_a_prompt_beside_answers_counts_as_what_it_added(demand, clock):
    clock.advance(1.0)
    demand.on_record(decoded(0.1, prefill=500, rows=20))
    assert demand.asked[0] == pytest.approx(0.09, rel=0.05)


def test_what_nobody_asks_any_more_is_forgotten(demand, clock):
    run(demand, clock, 60, prefill=0.5, decode=0.8)
    clock.advance(200.0)
    assert max(demand.asked) < 0.01


def test_nothing_is_asked_before_anything_ran(clock):
    assert Demand(clock, lambda: TPOT_S).asked == (0.0, 0.0)


def test_the_pace_is_that_of_the_default_class():
    assert promised_s(service_classes(["ttft=1s,tpot=40ms"])) == 0.04
    assert promised_s(service_classes(["ttft=1s"])) == USUAL_TPOT_S
