"""One request's timestamps: the identities hold, and it is judged as it should be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.core.service import choose_class, request_slo, service_classes
from headway.core.slo import Slo
from telemetry_cases import answer, begin, step, telemetry


def test_the_worked_example():
    """Arrived at 0, tokens leave at 2, 3 and two together at 5."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    for seconds, count in ((2, 1), (1, 1), (2, 2)):
        clock.advance(seconds)
        timeline.add_tokens(0, count)
    timeline.complete()
    assert timeline.ttft_s == 2 and timeline.ended.e2e_s == 5 and timeline.tpot_s == 1
    assert timeline.gaps().tolist() == [1, 2, 0]


def test_time_to_publish_skips_what_no_user_sees():
    """Reasoning leaves at 1 and 2, the first word of the answer at 5."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    for seconds, shown in ((1, False), (1, False), (3, True), (1, True)):
        clock.advance(seconds)
        timeline.add_tokens(0, 1)
        if shown:
            timeline.on_publish()
    timeline.complete()
    assert (timeline.ttft_s, timeline.publish_s, timeline.ended.e2e_s) == (1, 5, 6)
    assert timeline.timings()["publish_s"] == 5
    assert model.registry.histograms["time_to_publish_seconds"].sum == 5


def test_a_prompt_of_many_steps_is_in_prefill_from_its_first_chunk():
    """The engine says when it was first scheduled with the first token; its chunks come before."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a", num_prompt=2000)
    model.on_submit(timeline, 7)
    assert timeline.live(clock.now_s()).state == "waiting"
    clock.advance(1)
    model.on_step(step(num_decode_tokens=0, prefilling=[(7, 0, 1026)]))
    live = timeline.live(clock.now_s())
    assert (live.state, live.computed_tokens) == ("prefill", 1026)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 4)), min_size=1, max_size=40))
def test_gaps_add_up(pieces):
    """Σ ITL = e2e − TTFT, one gap less than tokens, none negative."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    for seconds, count in pieces:
        clock.advance(seconds)
        timeline.add_tokens(0, count)
    timeline.complete()
    gaps, ended = timeline.gaps(), timeline.ended
    assert len(gaps) == ended.output_tokens - 1 == sum(n for _, n in pieces) - 1
    assert (gaps >= 0).all()
    assert gaps.sum() == pytest.approx(ended.e2e_s - ended.ttft_s, abs=1e-6)
    if ended.tpot_s is not None:
        n = ended.output_tokens
        assert ended.tpot_s * (n - 1) == pytest.approx(ended.e2e_s - ended.ttft_s, abs=1e-6)


def test_several_sequences_have_gaps_of_their_own():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a", num_choices=2)
    for choice, seconds in ((0, 1), (1, 1), (0, 1), (1, 4)):
        clock.advance(seconds)
        timeline.add_tokens(choice, 1)
    timeline.complete()
    assert timeline.ttft_s == 1 and timeline.num_generated == 4
    assert timeline.gaps().tolist() == [2, 5]
    assert timeline.tpot_s == 5, "the slowest sequence's"


def test_only_the_first_end_counts():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = answer(model, clock, "a", [1, 1])
    timeline.disconnect()
    assert timeline.ended.outcome == "ok" and model.num_live == 0


def test_states():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    assert timeline.state() == "waiting"
    clock.advance(1)
    timeline.on_scheduled(clock.now_s(), 4)
    timeline.last_prefill_s = clock.now_s()
    assert timeline.state() == "prefill" and timeline.queue_s == 1
    clock.advance(1)
    timeline.add_tokens(0, 1)
    assert timeline.state() == "decode" and timeline.prefill_time_s == 1
    clock.advance(1)
    timeline.on_preempted(2)
    assert timeline.state() == "preempted"
    clock.advance(1)
    timeline.add_tokens(0, 1)
    assert timeline.state() == "preempted", "made before, and left after the news"
    clock.advance(1)
    timeline.add_tokens(0, 1)
    assert timeline.state() == "decode" and timeline.num_preemptions == 1


# ── judged ──────────────────────────────────────────────────────────────────────────────────


def test_goodput_is_30_when_30_of_100_meet_the_slo():
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms"])
    for number in range(100):
        timeline = begin(model, str(number), arrived_s=clock.now_s() - (0.4 if number < 30 else 2))
        timeline.add_tokens(0, 1)
        timeline.complete()
    clock.advance(1.0)
    window = model.window(10)
    (only,) = window.classes
    assert (only.num_judged, only.num_met, only.missed) == (100, 30, {"ttft": 70})
    assert only.attainment == pytest.approx(0.3)
    assert window.goodput_per_s * window.covered_s == pytest.approx(30)


@pytest.mark.parametrize(
    ("end", "waited_s", "expected"),
    [
        ("complete", 0.2, ()),
        ("complete", 0.8, ("ttft",)),
        ("fail", 0.2, ("failed",)),
        ("disconnect", 0.2, None),
        ("disconnect", 0.8, ("ttft",)),
    ],
)
def test_how_a_request_ends_is_judged(end, waited_s, expected):
    """A failure is a miss; a client that leaves counts only when it was too late already."""
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms"])
    timeline = begin(model, "a")
    clock.advance(waited_s)
    if end == "complete":
        timeline.add_tokens(0, 1)
    getattr(timeline, end)()
    assert timeline.ended.missed == expected


def test_itl_p99_is_over_the_gaps_of_the_request():
    clock = VirtualClock()
    model = telemetry(clock, slo=["itl_p99=100ms"])
    smooth = answer(model, clock, "a", [1.0] + [0.05] * 200)
    rough = answer(model, clock, "b", [1.0] + [0.05] * 150 + [0.5] * 5)
    assert smooth.ended.missed == () and rough.ended.missed == ("itl_p99",)
    assert rough.ended.itl_p99_s == pytest.approx(np.percentile(rough.gaps(), 99))


def test_a_request_brings_its_own_objectives():
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms", "interactive:ttft=1ms"])
    own = answer(model, clock, "a", [1.0], slo=Slo(ttft_s=2.0))
    assert own.ended.missed == ()
    interactive = model.classes["interactive"]
    assert answer(model, clock, "b", [1.0], service_class=interactive).ended.missed == ("ttft",)
    assert model.registry.values["slo_missed"] == {("interactive", "ttft"): 1}
    assert model.registry.values["slo_met"] == {("default",): 1}


def test_long_prompts_have_more_time_in_the_built_in_classes():
    interactive = service_classes([])["interactive"]
    assert interactive.objectives(500).ttft_s == 1.5
    assert interactive.objectives(1500).ttft_s == 3.5
    assert service_classes(["interactive:ttft=1s"])["interactive"].objectives(9999).ttft_s == 1


def test_classes_are_chosen_by_name():
    classes = service_classes(["gold:ttft=1s"])
    assert choose_class(classes, "gold", None).name == "gold"
    assert choose_class(classes, None, "gold").name == "gold"
    tiers = {"flex": "batch", "priority": "interactive", "auto": "default", "scale": "default"}
    for tier, name in tiers.items():
        assert choose_class(classes, None, tier).name == name, "OpenAI's own tier"
    assert choose_class(service_classes(["flex:e2e=9s"]), None, "flex").name == "flex"
    with pytest.raises(RequestError, match="there are interactive, standard, batch, gold") as error:
        choose_class(classes, "silver", None)
    assert error.value.param == "service_class"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ttft": "500ms", "tpot": "50ms"}, Slo(ttft_s=0.5, tpot_s=0.05)),
        ({"ttft_ms": 500, "e2e_ms": 2.5e3}, Slo(ttft_s=0.5, e2e_s=2.5)),
        ({"itl_p99": "1s"}, Slo(itl_p99_s=1.0)),
        ({}, Slo()),
        (None, None),
    ],
)
def test_the_field_slo(given, expected):
    assert request_slo(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"ttf": "500ms"},
        {"ttft": 500},
        {"ttft": "soon"},
        {"ttft": "9" * 40 + "s"},
        {"ttft_ms": "500"},
        {"ttft_ms": True},
        {"ttft_ms": -1},
        {"ttft_ms": 1e300},
        {"ttft": "1s", "ttft_ms": 5},
        {"": "1s"},
    ],
)
def test_a_wrong_slo_is_refused_by_name(given):
    with pytest.raises(RequestError) as error:
        request_slo(given)
    assert error.value.param == "slo" and error.value.status == 400


def test_tokens_are_counted_at_the_price_of_their_class():
    """10 prompt tokens, 8 of them cached, and 2 of an answer, at half price: (2 + 0.8 + 2) / 2."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a", service_class=model.classes["batch"])
    timeline.on_scheduled(clock.now_s(), 8)
    timeline.add_tokens(0, 2)
    timeline.complete()
    assert model.registry.values["priced_tokens"][("batch",)] == pytest.approx(2.4)
