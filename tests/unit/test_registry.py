"""The metric registry: the contract's names, in text that the official parser reads."""

import random

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.core.clock import VirtualClock
from headway.core.errors import EngineDownError, RequestError
from headway.telemetry.registry import ITL_BUCKETS_S, ROWS, Histogram
from unit.telemetry_cases import answer, step, telemetry

CONTRACT = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries "
    "prefix_cache_hits prompt_tokens generation_tokens request_success num_preemptions "
    "preemptions preempted_tokens "
    "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "iteration_tokens_total request_prompt_tokens request_generation_tokens "
    "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "admission_rejections goodput_requests slo_met slo_missed mfu_ratio mbu_ratio bottleneck "
    "validation_failures client_retries cost_usd time_to_publish_seconds tool_calls"
).split()


def busy(**more):
    """Telemetry after ten requests, some steps, a refusal and an invalid body."""
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms,tpot=50ms"], price_per_hour=2.0, **more)
    for number in range(10):
        model.on_step(step(number, num_preemptions=number // 5, gap_s=0.001))
        answer(model, clock, f"r{number}", [0.3] + [0.04] * 5)
        model.sequence_finished("stop")
    model.refused(EngineDownError("full"))
    model.refused(RequestError("no", code="invalid_value"))
    return model


@pytest.mark.parametrize("prefix", ["headway", "vllm"])
def test_all_names_are_there_and_parse(prefix):
    text = busy(prefix=prefix).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f"{prefix}:{name}" for name in CONTRACT} <= families.keys()
    for family in families.values():
        assert family.documentation and family.type != "unknown"
        for sample in family.samples:
            assert {"model_name", "engine"} <= sample.labels.keys()


def test_values():
    text = busy().render().decode()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name, **labels):
        common = {"model_name": "made-up", "engine": "0"}
        return samples["headway:" + name, *sorted({**common, **labels}.items())]

    assert value("generation_tokens_total") == 60 and value("prompt_tokens_total") == 100
    assert value("inter_token_latency_seconds_count") == 50
    assert value("inter_token_latency_seconds_bucket", le="0.025") == 0
    assert value("inter_token_latency_seconds_bucket", le="0.05") == 50
    assert value("time_to_first_token_seconds_sum") == pytest.approx(3.0)
    assert value("request_success_total", finished_reason="stop") == 10
    assert value("slo_met_total", **{"class": "default"}) == value("goodput_requests_total") == 10
    assert value("slo_missed_total", **{"class": "default"}, which="refused") == 1
    assert value("admission_rejections_total", reason="overloaded") == 1
    assert value("validation_failures_total", kind="request") == 1
    assert value("num_preemptions_total") == 1
    assert value("iteration_tokens_total_count") == 10
    assert value("cost_usd_total") == pytest.approx(2.0 * 5.0 / 3600)
    assert 0 < value("mfu_ratio", steps="decode") < 1 and value("mbu_ratio", steps="decode") > 0
    kinds = [s.value for f in text_string_to_metric_families(text)
             if f.name == "headway:bottleneck" for s in f.samples]  # fmt: skip
    assert sum(kinds) == 1


def test_token_counters_are_live_within_a_second():
    """Scraping twice counts nothing twice, and a running request's tokens are there."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = model.begin("a", arrived_s=0.0, num_prompt=10, num_choices=1)
    for expected in (1, 2, 3):
        clock.advance(0.1)
        timeline.tokens_left(0, 1)
        assert b'generation_tokens_total{engine="0",model_name="made-up"} %d' % expected in (
            model.render()
        )
        model.render()
    clock.advance(5)
    timeline.tokens_left(0, 2)
    assert b'generation_tokens_total{engine="0",model_name="made-up"} 5' in model.render()


def test_itl_buckets_begin_at_a_millisecond():
    assert ITL_BUCKETS_S[0] == 0.001 and list(ITL_BUCKETS_S) == sorted(set(ITL_BUCKETS_S))
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_our_histogram_is_the_official_one():
    draw = random.Random(0)
    values = [draw.choice([0.0, 0.001, 0.01, draw.expovariate(5), 500.0]) for _ in range(500)]
    theirs = prometheus_client.Histogram("h", "h", buckets=ITL_BUCKETS_S, registry=None)
    ours, at_once = Histogram(ITL_BUCKETS_S), Histogram(ITL_BUCKETS_S)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    import numpy as np

    at_once.observe_all(np.array(values))
    (family,) = theirs.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name == "h_bucket"]
    assert ours.cumulative() == at_once.cumulative() == buckets
    assert at_once.sum == pytest.approx(sum(values))
