"""What was asked lately, as the server tells it: lengths and times, and nobody's words."""

import msgspec

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.telemetry.traffic import TrafficRequest, take_traffic
from telemetry_cases import answer, begin, telemetry


def test_requests_in_the_order_they_came():
    clock = VirtualClock(100.0)
    model = telemetry(clock)
    late = begin(model, "late", num_prompt=30)
    clock.advance(0.2)
    answer(model, clock, "a", [0.5, 0.1, 0.1], num_prompt=20)
    late.add_tokens(0, 4)
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
    model.on_rejection(busy)
    clock.advance(1.0)
    model.on_rejection(busy, begin(model, "b", num_prompt=50))
    clock.advance(1.0)
    model.on_rejection(RequestError("No.", status=400), begin(model, "c"))
    found, _ = take_traffic(model)
    assert [(a.at_s, a.prompt, a.answer) for a in found] == [(0.0, 0, None), (1.0, 50, None)]


def test_nobody_is_named():
    assert set(TrafficRequest.__struct_fields__) == {
        *("at_s", "prompt", "cached", "answer", "n", "limit", "service_class")
    }
    assert msgspec.json.encode(TrafficRequest(1.0, 2, 0, None)) == b'[1.0,2,0,null,1,null,""]'
