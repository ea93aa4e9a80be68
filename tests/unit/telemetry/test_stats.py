"""What /stats says: windows over virtual time, utilization, cost, the live requests."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.perf.roofline import ModelWork, Roof
from headway.telemetry.counting import count_handover
from headway.telemetry.gaps import GapCounts
from headway.telemetry.snapshot import WINDOWS_S, Snapshot
from headway.telemetry.stats import take_snapshot
from headway.telemetry.windows import Slots, StepSums
from telemetry_cases import (
    BANDWIDTH,
    PEAK,
    answer,
    begin,
    ceilings,
    decoded,
    llama,
    step,
    telemetry,
)

# ── windows ─────────────────────────────────────────────────────────────────────────────────


def test_a_window_forgets_what_is_older():
    clock = VirtualClock(now_s=0.75)
    model = telemetry(clock)
    for number in range(100):
        answer(model, clock, str(number), [0.5, 0.5])
    found = [model.window(seconds) for seconds in WINDOWS_S]
    assert [w.latency["ttft"].count for w in found] == [10, 60, 100]
    assert [w.covered_s for w in found] == pytest.approx([9.75, 59.75, 100])
    assert all(w.arrivals_per_s == pytest.approx(1, rel=0.15) for w in found)
    assert all(w.output_tokens_per_s == pytest.approx(2, rel=0.15) for w in found)
    assert found[0].latency["itl"].p50 == pytest.approx(0.5, rel=0.006)
    clock.advance(1000)
    assert model.window(300).latency["ttft"].count == 0


def test_rates_right_after_the_start_are_per_covered_second():
    clock = VirtualClock(now_s=1000.7)
    model = telemetry(clock)
    answer(model, clock, "a", [0.1, 0.1])
    window = model.window(300)
    assert window.covered_s == pytest.approx(0.2)
    assert window.finished_per_s == pytest.approx(5)


def test_the_history_has_each_second_also_those_in_which_nothing_happened():
    """Two tokens in second 10, steps in it too, silence, one token in second 15."""
    clock = VirtualClock(now_s=10.0)
    model = telemetry(clock)
    model.on_step(step(num_running=3, num_waiting=1, kv_usage=0.5))
    answer(model, clock, "a", [0.25, 0.25])
    clock.advance(4.75)
    answer(model, clock, "b", [0.25])
    clock.advance(1)
    found = take_snapshot(model, with_history=True).history
    assert [point.at_s for point in found] == [11, 12, 13, 14, 15, 16]
    assert [point.output_tokens for point in found] == [2, 0, 0, 0, 0, 1]
    assert [point.input_tokens for point in found] == [10, 0, 0, 0, 0, 10]
    first = found[0]
    assert (first.num_running, first.num_waiting, first.kv_usage) == (3, 1, 0.5)
    assert first.ttft_p50 == first.ttft_p99 == 0.25 and first.tpot_p50 == 0.25
    assert found[1].num_running == 0 and found[1].ttft_p50 == 0.25, "of the last 10 s"
    assert take_snapshot(model).history == []
    for _ in range(1000):
        clock.advance(1)
        model.advance()
    assert len(take_snapshot(model, with_history=True).history) == 299


def test_slots_are_bounded():
    slots = Slots(0.0, 1)
    for second in range(1000):
        slots.at(float(second))
    found, covered_s = slots.last(300, 999.5)
    assert len(found) == 300 and covered_s == 299.5


@given(st.lists(st.floats(2e-5, 1000), min_size=1, max_size=300), st.integers(0, 50))
def test_gaps_in_bins_are_half_a_percent_off(gaps, num_zeros):
    """Every percentile is near one of the two ranks that the exact one lies between."""
    values = np.array([0.0] * num_zeros + gaps)
    counts = GapCounts()
    for part in np.array_split(values, 3):
        one = GapCounts()
        one.add(part)
        counts.merge(one)
    found, ranked = counts.percentiles(), np.sort(values)
    assert counts.count == len(values) and found.mean == pytest.approx(values.mean())
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.95, found.p95), (0.99, found.p99)):
        expected = ranked[int(share * (len(ranked) - 1) + 1e-9)]
        assert value == pytest.approx(expected, rel=0.0051)


def test_classes_have_percentiles_of_their_own():
    clock = VirtualClock()
    model = telemetry(clock, slo=["fast:ttft=200ms", "ttft=2s"], slo_target=0.5)
    for _ in range(3):
        answer(model, clock, "a", [0.1, 0.01], service_class=model.classes["fast"])
        answer(model, clock, "b", [1.0, 0.1])
    answer(model, clock, "c", [0.5, 0.01], service_class=model.classes["fast"])
    window = model.window(60)
    by_name = {found.name: found for found in window.classes}
    assert by_name["fast"].latency["itl"].p99 == pytest.approx(0.01, rel=0.006)
    assert by_name["default"].latency["itl"].p50 == pytest.approx(0.1, rel=0.006)
    assert by_name["fast"].objectives == "ttft=200ms"
    assert (by_name["fast"].num_met, by_name["fast"].missed) == (3, {"ttft": 1})
    assert by_name["fast"].attainment == 0.75
    assert by_name["fast"].remaining_budget == by_name["fast"].burn_rate == 0.5
    assert window.latency["ttft"].count == 7


# ── steps, ceilings ─────────────────────────────────────────────────────────────────────────


def sums(*records):
    found = StepSums.over(1)
    for record in records:
        found.add(record)
    return found


def test_utilization_of_a_decode_step():
    """Bytes: the weights once and 400 KV tokens; over 10 ms and 1 GB/s."""
    spec = llama()
    work = ModelWork(spec, "float32")
    place = Roof(ceilings()).place(work, sums(step()))
    num_bytes = spec.step_weight_bytes("float32") + 400 * spec.kv_bytes_per_token("float32")
    assert place.mbu == pytest.approx(num_bytes / 0.01 / BANDWIDTH)
    assert place.mfu == pytest.approx(spec.flops(4, 100, 4) / 0.01 / PEAK)
    assert place.roofline == pytest.approx(max(place.mbu, place.mfu)) and not place.above_ceiling


def test_a_window_group_reads_its_window():
    """Gemma 3's shape in small: of a context of 400 the window group reads 50."""
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = llama(
        architectures=["Gemma3ForCausalLM"], sliding_window=50, layer_types=kinds, head_dim=16
    )
    groups = {group.window: group.bytes_per_token("float32") for group in spec.kv_groups}
    order = [group.window for group in spec.kv_groups]
    read = [{50: 50, 0: 400}[window] for window in order]
    found = StepSums.over(2)
    found.add(step(kv_tokens_read=read))
    expected = spec.step_weight_bytes("float32") + 50 * groups[50] + 400 * groups[0]
    assert ModelWork(spec, "float32").num_bytes(found) == expected


def test_experts_are_read_as_often_as_they_are_hit():
    spec = llama(
        architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, head_dim=16,
    )  # fmt: skip
    work = ModelWork(spec, "float32")
    found = sums(step(experts_read=12), step(experts_read=20))
    kv = 800 * spec.kv_bytes_per_token("float32")
    one = spec.expert_parameters * 4
    assert work.num_bytes(found) - kv == 2 * spec.step_weight_bytes("float32", 0) + 32 * one
    assert work.num_bytes(sums(step())) > work.num_bytes(sums(step(experts_read=4))), "all of them"


def test_a_ratio_above_one_is_shown_flagged_and_raises_the_ceiling():
    work, roof = ModelWork(llama(), "float32"), Roof(ceilings(bandwidth=1e6))
    many = sums(*[step() for _ in range(100)])
    first = roof.place(work, many)
    assert first.mbu > 1 and first.above_ceiling and roof.raised == 1
    second = roof.place(work, many)
    assert second.mbu == pytest.approx(1.0) and not second.above_ceiling
    roof.take(ceilings(bandwidth=2e6))
    assert roof.ceilings.bandwidth_bytes_per_s == pytest.approx(first.bytes_per_s), "stays raised"


def test_a_moment_raises_nothing():
    work, roof = ModelWork(llama(), "float32"), Roof(ceilings(bandwidth=1e6))
    assert roof.place(work, sums(step())).above_ceiling and roof.raised == 0


def test_a_cache_resident_model_gets_no_mbu():
    clock = VirtualClock()
    model = telemetry(clock, cache=2**30)
    for number in range(600):
        model.on_step(step(number))
        clock.advance(0.01)
    found = take_snapshot(model)
    assert found.machine.cache_resident and found.windows[0].decode.mbu is None
    assert found.windows[0].verdict.kind not in ("bandwidth", "unknown")
    assert found.machine.bandwidth_bytes_per_s == BANDWIDTH, "nor does it raise the bandwidth"


def test_shares_of_wall_time():
    """100 steps of 10 ms with gaps of 5 ms, then as long idle."""
    clock = VirtualClock()
    model = telemetry(clock)
    for number in range(100):
        clock.advance(0.015)
        model.on_step(step(number, gap_s=0.005, num_waiting=3))
    clock.advance(1.5)
    stats = model.window(10).steps
    assert stats.count == 100 and stats.mean.waiting == 3
    assert stats.busy_share == pytest.approx(1 / 3, rel=0.01)
    assert stats.gap_share == pytest.approx(1 / 6, rel=0.01)
    assert stats.busy_share + stats.gap_share + stats.idle_share == pytest.approx(1)
    mean = stats.mean
    inside = mean.schedule_s + mean.prepare_s + mean.forward_s + mean.sample_s + mean.update_s
    assert inside + mean.other_s == pytest.approx(mean.duration_s)


def test_a_dead_engine_holds_nothing():
    clock = VirtualClock()
    model = telemetry(clock)
    model.on_step(step(1, num_preemptions=5))
    model.on_death()
    assert b'num_requests_running{engine="0",model_name="made-up"} 0' in model.render()
    model.on_step(step(0, num_preemptions=1))
    assert model.registry.values["num_preemptions"][()] == 5 + 1


def test_engines_that_are_asked_are_told():
    clock = VirtualClock()
    model = telemetry(clock, slo=["tpot=20ms"])
    for _ in range(50):
        clock.advance(0.1)
        model.on_step(decoded(0.05, prefill=500))
        model.on_step(decoded(0.01, rows=10))
    prefill, decode = take_snapshot(model).now.engine_demand
    assert prefill == pytest.approx(0.5, rel=0.1) and 0 < decode < 1
    text = model.render().decode()
    assert 'headway:engines_asked{engine="0",kind="prefill",model_name="made-up"} 0.5' in text


def test_roles_and_what_came_of_hand_overs():
    model = telemetry(VirtualClock())
    model.engines.num = 3
    model.engines.ready = {0, 1}
    assert {each.role for each in take_snapshot(model).engines} == {"both"}
    model.engines.roles = ["prefill", "decode", "decode"]
    for outcome, seconds in [("taken", 0.03), ("taken", 0.2), ("stayed", None)]:
        count_handover(model.registry, outcome, seconds)
    found = take_snapshot(model)
    assert [each.role for each in found.engines] == ["prefill", "decode", "decode"]
    assert found.totals.handovers == {"taken": 2, "stayed": 1}
    text = model.render().decode()
    assert 'headway:engines{engine="0",model_name="made-up",role="decode"} 1.0' in text
    assert 'headway:engines{engine="0",model_name="made-up",role="both"} 0.0' in text
    assert 'kv_handovers_total{engine="0",model_name="made-up",outcome="refused"} 0.0' in text
    assert 'kv_handover_seconds_count{engine="0",model_name="made-up"} 2.0' in text


# ── cost ────────────────────────────────────────────────────────────────────────────────────


def test_cost_of_tokens_and_requests():
    """$2 an hour, 100 tokens/s: $5.56 a million, and half of it for prompts that took half."""
    clock = VirtualClock()
    model = telemetry(clock, price_per_hour=2.0, slo=["ttft=10s"])
    begun = model.begin("a", arrived_s=0.0, num_prompt=500, num_choices=1)
    for number in range(50):
        prefill = {"num_tokens": 10, "num_decode_tokens": 0} if number % 2 else {}
        model.on_step(step(number, **prefill))
        clock.advance(0.01)
        begun.add_tokens(0, 1)
    clock.advance(0.499)
    begun.complete()
    cost = model.window(10).cost
    rate = 50 / 0.999
    assert cost.usd_per_million_tokens == pytest.approx(2 / (rate * 3600) * 1e6)
    assert cost.usd_per_million_output == pytest.approx(cost.usd_per_million_tokens / 2)
    assert cost.usd_per_million_input == pytest.approx(cost.usd / 2 / 250 * 1e6)
    assert cost.usd_per_request == cost.usd_per_met_request == pytest.approx(cost.usd)
    assert telemetry(clock).window(10).cost is None


# ── the snapshot ────────────────────────────────────────────────────────────────────────────


def test_live_requests():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "chatcmpl-1", num_prompt=100, num_choices=2)
    model.on_submit(timeline, 7)
    clock.advance(2)
    begin(model, "chatcmpl-2")
    model.on_step(step(1, num_tokens=68, prefilling=[(7, 0, 64)], num_waiting=1))
    first, second = take_snapshot(model).now.requests
    assert (first.id, first.age_s, first.state) == ("chatcmpl-1", 2.0, "prefill")
    timeline.on_scheduled(clock.now_s(), 16)
    first = take_snapshot(model).now.requests[0]
    assert (first.state, first.computed_tokens, first.cached_tokens) == ("prefill", 64, 16)
    clock.advance(1)
    timeline.add_tokens(0, 1)
    clock.advance(1)
    timeline.add_tokens(0, 1)
    model.on_step(step(2, num_preemptions=1, preempted=[(7, 0)]))
    clock.advance(1)
    first = take_snapshot(model).now.requests[0]
    assert (first.generated_tokens, first.computed_tokens, first.ttft_s) == (2, 101, 3.0)
    assert second.state == "waiting" and second.prompt_tokens == 10
    timeline.complete()
    assert [found.id for found in take_snapshot(model).now.requests] == ["chatcmpl-2"]


def test_what_becomes_of_preempted_tokens_is_counted():
    """Three were preempted, one of them copied; two came back, 30 tokens are computed again."""
    model = telemetry(VirtualClock())
    model.on_step(step(1, num_preemptions=3, num_swapped=1, num_swapped_tokens=100))
    model.on_step(step(2, num_preemptions=3, num_lost_tokens=30))
    model.on_step(step(3, num_preemptions=3))
    assert model.registry.values["preemptions"] == {("lost",): 2, ("copied",): 1}
    assert model.registry.values["preempted_tokens"] == {("lost",): 30, ("copied",): 100}


def test_a_preempted_request_says_so():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    model.on_submit(timeline, 3)
    timeline.on_scheduled(0.0, 0)
    clock.advance(1)
    timeline.add_tokens(0, 1)
    clock.advance(1)
    model.on_step(step(1, num_preemptions=1, preempted=[(3, 1)]))
    (found,) = take_snapshot(model).now.requests
    assert found.state == "preempted" and found.num_preemptions == 1
    assert timeline.timings()["preemptions"] == 1


def test_totals_and_errors():
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=1s"])
    answer(model, clock, "a", [0.5, 0.5])
    answer(model, clock, "b", [1.5])
    model.on_rejection(RequestError("?", code="invalid_type"))
    model.on_rejection(RequestError("full", code="overloaded", status=503))
    timeline = begin(model, "c")
    model.on_failure(timeline, RequestError("dead", code="engine_died", status=503))
    begun = begin(model, "d")
    model.on_failure(begun, RequestError("too long", code="context_length_exceeded"))
    totals = take_snapshot(model).totals
    assert totals.errors == {
        "invalid_type": 1,
        "overloaded": 1,
        "engine_died": 1,
        "context_length_exceeded": 1,
    }
    assert totals.validation_failures == {"request": 2}
    assert totals.admission_rejections == {"overloaded": 1}
    assert (totals.slo_met, totals.slo_missed, totals.generation_tokens) == (1, 3, 3)
    assert model.window(10).num_failed == 2


def test_it_is_json_and_comes_back():
    clock = VirtualClock()
    model = telemetry(clock, price_per_hour=1.0)
    begin(model, "a")
    for number in range(300):
        model.on_step(step(number))
    found = take_snapshot(model, "ready")
    data = msgspec.json.encode(found)
    assert msgspec.json.decode(data, type=Snapshot) == found
    raw = msgspec.json.decode(data)
    assert raw["now"]["requests"][0]["class"] == "default"
    assert len(raw["steps"]) == 200 and raw["steps"][-1][0] == 299
    assert len(raw["windows"]) == len(WINDOWS_S)


def test_before_the_engine_is_ready():
    clock = VirtualClock()
    from headway.telemetry.live import Telemetry

    model = Telemetry(["made-up"], llama(), clock=clock)
    found = take_snapshot(model, "loading 10%")
    assert found.machine.bandwidth_bytes_per_s is None and found.status == "loading 10%"
    assert found.windows[0].verdict.kind == "under-loaded"
    assert model.render()
