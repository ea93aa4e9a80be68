"""What was asked lately, as the server tells it: lengths and times, and nobody's words."""

import msgspec
import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.telemetry import traffic
from headway.telemetry.traffic import Asked, stretch_since, take_traffic
from telemetry_cases import answer, begin, telemetry


def test_requests_in_the_order_they_came():
    clock = VirtualClock(100.0)
    model = telemetry(clock)
    late = begin(model, "late", num_prompt=30)
    clock.advance(0.2)
    answer(model, clock, "a", [0.5, 0.1, 0.1], num_prompt=20)
    late.tokens_left(0, 4)
    late.complete()
    found, from_s = take_traffic(model)
    assert [(asked.prompt, asked.answer) for asked in found] == [(30, 4), (20, 3)]
    assert found[0].at_s == 0.0 and round(found[1].at_s, 3) == 0.2
    assert from_s == 100.0
    assert take_traffic(model, since_s=clock.now_s() + 1) == ([], None)


def test_those_refused_have_no_answer():
    clock = VirtualClock(100.0)
    model = telemetry(clock)
    busy = RequestError("Too many wait.", status=503, code="overloaded")
    model.refused(busy)
    clock.advance(1.0)
    model.refused(busy, begin(model, "b", num_prompt=50))
    clock.advance(1.0)
    model.refused(RequestError("No.", status=400), begin(model, "c"))
    found, _ = take_traffic(model)
    assert [(a.at_s, a.prompt, a.answer) for a in found] == [(0.0, 0, None), (1.0, 50, None)]


def test_nobody_is_named():
    assert set(Asked.__struct_fields__) == {
        *("at_s", "prompt", "cached", "answer", "n", "limit", "service_class")
    }
    assert msgspec.json.encode(Asked(1.0, 2, 0, None)) == b'[1.0,2,0,null,1,null,""]'


def test_what_became_of_those_that_were_not_over():
    """From 100 s on: one that was over before, one under way then, and three that came since."""
    clock = VirtualClock(98.0)
    model = telemetry(clock)
    answer(model, clock, "over", [0.5], num_prompt=10)
    clock.advance(0.5)
    early = begin(model, "early", num_prompt=20, max_tokens=64)
    early.scheduled(clock.now_s(), 16)
    clock.advance(2.0)
    early.tokens_left(0, 1)
    runs, _ = begin(model, "runs", num_prompt=30), begin(model, "waits", num_prompt=40)
    clock.advance(1.0)
    early.tokens_left(0, 2)
    early.complete()
    runs.tokens_left(0, 5)
    model.refused(RequestError("Too many wait.", status=503, code="overloaded"))
    clock.advance(0.5)
    found = stretch_since(model, 100.0)
    assert (found.from_s, found.until_s) == (0.0, pytest.approx(2.5))
    told = {each.prompt: each for each in found.requests}
    assert list(told) == [20, 30, 40, 0]
    early, runs, waits, refused = told.values()
    assert (early.at_s, early.ttft_s, early.took_s) == pytest.approx((-1.0, 2.0, 3.0))
    assert (early.cached, early.answer, early.limit) == (16, 3, 64)
    assert (runs.answer, runs.ttft_s, runs.took_s) == (5, pytest.approx(1.0), None)
    assert (waits.answer, waits.ttft_s, waits.took_s) == (None, None, None)
    assert (refused.answer, refused.took_s, refused.met) == (None, 0.0, False)


def test_whether_it_has_missed_anything_so_far():
    clock = VirtualClock(100.0)
    model = telemetry(clock, slo=["ttft=1s,tpot=100ms"])
    begin(model, "waits", num_prompt=10)
    slow = begin(model, "slow", num_prompt=20)
    slow.tokens_left(0, 1)
    clock.advance(0.5)
    slow.tokens_left(0, 1)
    left = begin(model, "left", num_prompt=30)
    left.tokens_left(0, 1)
    left.left()

    def met():
        return {each.prompt: each.met for each in stretch_since(model, 0.0).requests}

    assert met() == {10: True, 20: False, 30: None}
    clock.advance(1.0)
    assert met()[10] is False


def test_of_very_many_the_newest_are_told(monkeypatch):
    """From when on they are all there is told with them."""
    monkeypatch.setattr(traffic, "MOST_ENDED", 10)
    clock = VirtualClock(100.0)
    model = telemetry(clock)
    for number in range(20):
        clock.advance(1.0)
        begin(model, f"{number}").complete()
    found = stretch_since(model, 0.0)
    assert [each.at_s for each in found.requests] == list(range(1, 11)) and found.until_s == 10.0
