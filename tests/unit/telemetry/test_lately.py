"""Who asked lately and met what, from a server's own records."""

import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import OverloadedError
from headway.core.service import service_classes
from headway.telemetry.lately import judged_lately, shape_of
from headway.telemetry.live import Telemetry
from simulated_house import SPEC


@pytest.fixture
def telemetry():
    return Telemetry(
        ["tiny"], SPEC, clock=VirtualClock(100.0), classes=service_classes(["ttft=1s,tpot=100ms"])
    )


def begin(telemetry, name: str):
    return telemetry.begin(name, arrived_s=telemetry.clock.now_s(), num_prompt=30, num_choices=1)


def test_those_that_are_over_those_that_are_late_and_those_refused(telemetry):
    clock = telemetry.clock
    good, late, waits = (begin(telemetry, name) for name in ("good", "late", "waits"))
    clock.advance(0.5)
    good.tokens_left(0, 1)
    clock.advance(0.05)
    good.tokens_left(0, 1)
    good.complete()
    assert [each.met for each in judged_lately(telemetry, 0.0)] == [True]
    clock.advance(1.0)
    assert [each.met for each in judged_lately(telemetry, 0.0)] == [True, False, False]
    waits.tokens_left(0, 1)  # late, and it is not over: nobody knows what it will be called
    late.left()
    telemetry.refused(OverloadedError("full", reason="queue_requests", retry_after_s=1.0))
    found = judged_lately(telemetry, 0.0)
    assert [each.met for each in found] == [True, False, False]
    assert (found[0].prompt, found[0].answer, found[0].ttft_s) == (30, 2, pytest.approx(0.5))
    assert found[0].tpot_s == pytest.approx(0.05)
    assert found[-1].at_s == clock.now_s() and found[-1].prompt == 0
    assert [each.at_s for each in judged_lately(telemetry, 101.0)] == [clock.now_s()]


def test_who_says_nothing_of_the_server_is_left_out(telemetry):
    left, moved = begin(telemetry, "left"), begin(telemetry, "moved")
    left.tokens_left(0, 1)
    left.left()
    moved.moved()
    assert judged_lately(telemetry, 0.0) == []


def test_all_of_a_busy_server_are_seen_not_the_newest_alone(telemetry):
    """More than it keeps timelines of: 300 a second, 20 s of them."""
    for second in range(20):
        for number in range(300):
            begin(telemetry, f"{second}-{number}").complete()
        telemetry.clock.advance(1.0)
    assert len(telemetry.finished) < 3000
    assert len(judged_lately(telemetry, 0.0)) == 6000
    found = judged_lately(telemetry, 110.0)
    assert shape_of(found, 10.0).per_s == pytest.approx(300)
