"""The metric registry: the contract's names, in text that the official parser reads."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.core.clock import VirtualClock
from headway.core.errors import EngineDownError, RequestError
from headway.core.records import StepRecord
from headway.telemetry import reference
from headway.telemetry.registry import ITL_BUCKETS_S, ROWS, Histogram, Registry
from telemetry_cases import answer, begin, step, telemetry

CONTRACT = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries "
    "prefix_cache_hits prompt_tokens generation_tokens request_success num_preemptions "
    "preemptions preempted_tokens "
    "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "iteration_tokens_total request_prompt_tokens request_generation_tokens "
    "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos "
    "admission_rejections goodput_requests slo_met slo_missed mfu_ratio mbu_ratio bottleneck "
    "validation_failures client_retries cost_usd time_to_publish_seconds tool_calls "
    "num_requests_waiting_by_reason cache_config_info request_params_n request_params_max_tokens "
    "request_inference_time_seconds request_num_preemptions request_max_num_generation_tokens "
    "request_prefill_kv_computed_tokens prompt_tokens_by_source prompt_tokens_cached "
    "prompt_tokens_cached_by_source estimated_flops_per_gpu estimated_read_bytes_per_gpu "
    "slo_requests"
).split()
VLLM = (  # what vLLM 0.33 registers in v1/metrics, v1/spec_decode, parser and entrypoints
    "admission_rejections cache_config_info corrupted_requests e2e_request_latency_seconds "
    "engine_sleep_state estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total "
    "estimated_write_bytes_per_gpu_total external_prefix_cache_hits external_prefix_cache_queries "
    "generation_tokens inter_token_latency_seconds iteration_tokens_total "
    "kv_block_idle_before_evict_seconds kv_block_lifetime_seconds kv_block_reuse_gap_seconds "
    "kv_cache_usage_perc lora_requests_info mm_cache_hits mm_cache_queries num_preemptions "
    "num_requests_kv_fetch_by_stage num_requests_running num_requests_waiting "
    "num_requests_waiting_by_reason prefix_cache_hits prefix_cache_queries prompt_tokens "
    "prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source "
    "request_decode_time_seconds request_generation_tokens request_inference_time_seconds "
    "request_max_num_generation_tokens request_num_preemptions request_params_max_tokens "
    "request_params_n request_prefill_kv_computed_tokens request_prefill_time_seconds "
    "request_prompt_tokens request_queue_time_seconds request_success "
    "request_time_per_output_token_seconds spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos spec_decode_num_draft_tokens spec_decode_num_drafts "
    "time_to_first_token_seconds tool_call_parser_invocations_total watermark_requests "
    "websocket_connection_duration_seconds websocket_connections_active "
    "websocket_connections_total"
).split()
DOCS = Path(__file__).resolve().parents[3] / "docs" / "telemetry.md"
OLD_NAMES = {row.vllm for row in ROWS if row.vllm}


def busy(**more):
    """Telemetry after ten requests, some steps, a refusal and an invalid body."""
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=500ms,tpot=50ms"], price_per_hour=2.0, **more)
    for number in range(10):
        model.on_step(step(number, num_preemptions=number // 5, gap_s=0.001))
        answer(model, clock, f"r{number}", [0.3] + [0.04] * 5)
        model.on_sequence_end("stop")
    model.on_rejection(EngineDownError("full"))
    model.on_rejection(RequestError("no", code="invalid_value"))
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


def test_each_name_of_vllm_is_served_or_the_docs_say_why_not():
    families = text_string_to_metric_families(busy(prefix="vllm").render().decode())
    names = {family.name.removeprefix("vllm:") for family in families}
    missing = {name for name in VLLM if name.removesuffix("_total") not in names} - names
    table = DOCS.read_text().split("Names of vLLM without a meaning here", 1)[1].split("\n\n", 3)[1]
    firsts = " ".join(line.split("|")[1] for line in table.splitlines())
    explained = set(re.findall(r"`([a-z0-9_]+)`", firsts))
    assert missing == explained


def test_a_gauge_that_names_a_field_of_the_step_shows_it():
    """Adding one is a field of the record and a row: nothing else sets it."""
    model = telemetry(VirtualClock())
    shown = {row.name: row.of_step for row in ROWS if row.of_step}
    assert {"num_requests_running", "kv_cache_usage_perc"} <= shown.keys()
    assert set(shown.values()) <= set(StepRecord.__struct_fields__)
    for record in (None, step(1, num_running=3, num_waiting=2, kv_usage=0.25)):
        if record is not None:
            model.on_step(record)
        families = text_string_to_metric_families(model.render().decode())
        found = {family.name: family.samples[0].value for family in families if family.samples}
        for name, field in shown.items():
            assert found[f"headway:{name}"] == (getattr(record, field) if record else 0)
    assert found["headway:num_requests_running"] == 3 and found["headway:num_requests_waiting"] == 2
    assert found["headway:kv_cache_usage_perc"] == 0.25


def test_the_age_of_a_queue_is_that_of_its_oldest_request():
    """A request that is in a step, or has ended, waits no more."""
    clock = VirtualClock()
    model = telemetry(clock)

    def ages():
        families = text_string_to_metric_families(model.render().decode())
        (row,) = [each for each in families if each.name == "headway:queue_age_seconds"]
        return {sample.labels["class"]: sample.value for sample in row.samples}

    assert ages() == {"interactive": 0, "default": 0, "standard": 0, "batch": 0}
    first = begin(model, "a")
    clock.advance(5)
    model.on_submit(begin(model, "b"), 7)
    clock.advance(2)
    assert ages()["default"] == 7
    first.on_scheduled(clock.now_s(), 0)
    assert ages()["default"] == 2
    model.on_step(step(1, prefilling=[(7, 0, 4)]))
    assert ages()["default"] == 0


def test_the_page_has_the_table():
    """docs/telemetry.md is written by `python -m headway.telemetry.reference`."""
    page = DOCS.read_text(encoding="utf-8")
    assert page == reference.with_table(page)
    assert all(f"| `{row.name}` | {row.kind} | {row.help} |" in page for row in ROWS)


def faults(text):
    """What promtool's linter says of names and help, in our own words; colons are vLLM's."""
    for family in text_string_to_metric_families(text):
        name, kind = family.name.partition(":")[2], family.type
        if not family.documentation:
            yield f"{name}: no help text"
        if re.search("[A-Z]", name) or re.search("_(ms|milliseconds|minutes|mib|kb)(_|$)", name):
            yield f"{name}: camel case, or a unit that is no base unit"
        if kind in name.split("_"):
            yield f"{name}: names its type"
        for sample in family.samples:
            total = sample.name.endswith("_total")
            if kind == "counter" and not total:
                yield f"{sample.name}: a counter without _total"
            if kind != "counter" and (total or name.endswith("_total")):
                yield f"{name}: no counter, and named _total"
            if kind not in ("histogram", "summary") and re.search("_(count|sum|bucket)$", name):
                yield f"{name}: no histogram, and named like a part of one"
            if kind != "histogram" and "le" in sample.labels:
                yield f"{name}: no histogram, and has the label le"


@pytest.mark.parametrize("prefix", ["headway", "vllm"])
def test_names_follow_the_rules_of_prometheus(prefix):
    """But for the one of vLLM that does not, which `headway:` serves beside its new name."""
    found = set(faults(busy(prefix=prefix).render().decode()))
    assert found == {f"{name}: no counter, and named _total" for name in OLD_NAMES}


@pytest.mark.parametrize("prefix", ["headway", "vllm"])
def test_promtool_finds_nothing_else(prefix):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text = busy(prefix=prefix).render()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    said = (done.stdout + done.stderr).decode().splitlines()
    left = [line for line in said if "should not contain ':'" not in line]
    assert {line.split()[0] for line in left} == {f"{prefix}:{name}" for name in OLD_NAMES}, said


def test_an_old_name_stays_beside_the_new_one():
    text = busy().render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    new, old = families["headway:iteration_tokens"], families["headway:iteration_tokens_total"]
    assert [s.value for s in new.samples] == [s.value for s in old.samples]
    assert old.documentation.startswith("Old name of iteration_tokens, until version ")
    assert "vllm:iteration_tokens\n" not in Registry("m", prefix="vllm").render().decode()


def test_series_exist_before_anything_is_counted():
    """A rate over a series that begins with its first miss has no miss, and no attainment."""
    model = telemetry(VirtualClock(), slo=["interactive:ttft=500ms"])
    samples = {}
    for family in text_string_to_metric_families(model.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            name = sample.name.partition(":")[2]
            samples[name, *(labels[key] for key in sorted(labels))] = sample.value
    for name in ("interactive", "standard", "batch", "default"):
        for metric in ("slo_requests_total", "slo_met_total", "priced_tokens_total"):
            assert samples[metric, name] == 0
        assert samples["slo_missed_total", name, "refused"] == 0
    assert samples["slo_missed_total", "interactive", "ttft"] == 0
    assert ("slo_missed_total", "interactive", "tpot") not in samples, "it promises none"
    assert samples["request_success_total", "stop"] == 0
    assert samples["admission_rejections_total", "queue_requests"] == 0
    counters = [row for row in ROWS if row.kind == "counter" and row.labels]
    elsewhere = ("spec_decode_", "task_failures")  # test_drafts, test_supervision
    labelled = [row for row in counters if not row.name.startswith(elsewhere)]
    assert {row.name for row in labelled} <= {name.removesuffix("_total") for name, *_ in samples}


def test_attainment_counts_a_request_once_whatever_it_missed():
    clock = VirtualClock()
    model = telemetry(clock, slo=["ttft=10ms,tpot=1ms"])
    answer(model, clock, "late and slow", [0.3, 0.04, 0.04])
    values = model.registry.values
    assert sum(values["slo_missed"].values()) == 2
    assert values["slo_requests"] == {("default",): 1}


def test_what_a_request_asked_for_and_where_its_prompt_was():
    clock = VirtualClock()
    model = telemetry(clock)
    model.on_step(
        step(0, num_queried_tokens=30, num_cached_tokens=20, num_waiting=3, num_deferred=1)
    )
    timeline = model.begin("a", arrived_s=0.0, num_prompt=30, num_choices=2, n=2, max_tokens=50)
    timeline.on_scheduled(1.0, 20)
    clock.advance(2)
    timeline.add_tokens(0, 1)
    timeline.add_tokens(1, 4)
    timeline.on_preempted(1)
    clock.advance(1)
    timeline.add_tokens(0, 1)
    timeline.complete()
    model.render()
    sums = {name: histogram.sum for name, histogram in model.registry.histograms.items()}
    assert sums["request_params_n"] == 2 and sums["request_params_max_tokens"] == 50
    assert sums["request_inference_time_seconds"] == 2.0  # last token at 3, scheduled at 1
    assert sums["request_num_preemptions"] == 1
    assert sums["request_max_num_generation_tokens"] == 4
    assert sums["request_generation_tokens"] == 6
    assert sums["request_prefill_kv_computed_tokens"] == 10
    values = model.registry.values
    assert values["prompt_tokens_by_source"] == {("local_cache_hit",): 20, ("local_compute",): 10}
    assert values["prompt_tokens_cached"][()] == 20
    assert values["num_requests_waiting_by_reason"] == {("deferred",): 1, ("capacity",): 2}
    assert list(values["cache_config_info"]) == [("16", "float32", "True", "100", "1600", "0.78")]


def test_work_of_the_steps_adds_up_over_seconds_and_scrapes():
    clock = VirtualClock()
    model, once = telemetry(clock), telemetry(VirtualClock())
    for number in range(30):
        model.on_step(step(number))
        once.on_step(step(number))
        clock.advance(0.1)
        if number % 7 == 0:
            model.render()
    model.render(), once.render()
    for name in ("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu"):
        whole = once.registry.values[name][()]
        assert whole > 0 and model.registry.values[name][()] == pytest.approx(whole)


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
    assert value("iteration_tokens_count") == 10
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
        timeline.add_tokens(0, 1)
        assert b'generation_tokens_total{engine="0",model_name="made-up"} %d' % expected in (
            model.render()
        )
        model.render()
    clock.advance(5)
    timeline.add_tokens(0, 2)
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
