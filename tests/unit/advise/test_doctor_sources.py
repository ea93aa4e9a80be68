"""Readings from `/stats`, `/metrics` and bench reports, made up so that every figure is known."""

from pathlib import Path

import msgspec
import pytest

from bench_runs import run_of, steady
from headway.advise.diagnosis import diagnose
from headway.advise.from_metrics import parse_scrape, quantile, reading_from_metrics
from headway.advise.from_report import reading_from_report
from headway.advise.from_stats import reading_from_stats
from headway.advise.watch import base_url
from headway.bench.report import build_report
from headway.core.clock import VirtualClock
from headway.core.errors import UsageError
from headway.perf.roofline import find_sheet, read_sheets
from headway.telemetry.live import Telemetry
from headway.telemetry.prefixes import find_shared_prefixes
from headway.telemetry.snapshot import PrefixSharing, Snapshot
from headway.telemetry.stats import take_snapshot
from telemetry_cases import answer, begin, step, telemetry


def snapshot(model: Telemetry, seconds: int = 20) -> Snapshot:
    """As it comes over HTTP."""
    built = take_snapshot(model, "ready", (seconds,))
    return msgspec.json.decode(msgspec.json.encode(built), type=Snapshot)


def run_steps(model: Telemetry, clock: VirtualClock, first: int, count: int) -> None:
    for number in range(first, first + count):
        clock.advance(0.01)
        model.on_step(step(number))


# ── /stats ──────────────────────────────────────────────────────────────────────────────────────


def test_the_window_asked_for_is_the_one_that_is_read() -> None:
    clock = VirtualClock()
    model = telemetry(clock, price_per_hour=2.0)
    for i in range(5):
        answer(model, clock, f"r{i}", [0.5, 0.1, 0.1])
        run_steps(model, clock, 100 * i, 100)
    polls = [snapshot(model)]
    reading = reading_from_stats("http://made.up", polls, seconds=20)
    assert reading.seconds == pytest.approx(polls[0].windows[-1].covered_s)
    assert reading.load.num_ended == 5 and reading.latency.ttft.mean == pytest.approx(0.5)
    assert reading.queue_s == pytest.approx(0.25) and reading.prefill_s == pytest.approx(0.25)
    assert reading.decode_s == pytest.approx(0.2) and reading.request_s == pytest.approx(0.7)
    assert (
        reading.steps.rows == 4
        and reading.limits.max_num_seqs == 8
        and reading.kv.num_tokens == 1600
    )
    assert (
        reading.spend.usd_per_million_output is not None
        and reading.spend.usd_per_million_output > 0
    )


def test_a_price_given_to_the_doctor_counts_where_the_server_has_none() -> None:
    clock = VirtualClock()
    model = telemetry(clock)
    answer(model, clock, "r", [0.5, 0.1, 0.1])
    run_steps(model, clock, 0, 100)
    polls = [snapshot(model)]
    assert reading_from_stats("u", polls, seconds=20).spend.usd_per_million_output is None
    priced = reading_from_stats("u", polls, seconds=20, price_per_hour=3.6)
    spent = 0.001 * priced.seconds
    assert priced.spend.usd_per_million_output == pytest.approx(spent / 3 * 1e6)


def slow_case(num_sent: int, running: int = 4) -> list[Snapshot]:
    """A request that decodes while 100 steps run, of whose tokens `left` leave."""
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "r")
    timeline.on_scheduled(clock.now_s(), 0)
    clock.advance(0.1)
    timeline.add_tokens(0, 1)
    run_steps(model, clock, 0, 10)
    polls = [snapshot(model)]
    run_steps(model, clock, 10, 100)
    timeline.add_tokens(0, num_sent)
    model.engines.last.num_running = running
    polls.append(snapshot(model))
    clock.advance(1.5)
    polls.append(snapshot(model))
    return polls


def test_a_request_whose_tokens_stay_is_read_slowly() -> None:
    reading = reading_from_stats("u", slow_case(num_sent=10), seconds=20)
    (slow,) = reading.client.slow_streams
    assert (slow.id, slow.generated, slow.sent) == ("r", 100, 10)
    assert diagnose(reading).bottleneck.name == "slow-client"


def test_a_request_at_the_engines_pace_is_not() -> None:
    assert reading_from_stats("u", slow_case(num_sent=99), seconds=20).client.slow_streams == ()


def test_what_still_decodes_while_nothing_runs_waits_for_its_reader() -> None:
    reading = reading_from_stats("u", slow_case(num_sent=99, running=0), seconds=20)
    assert len(reading.client.slow_streams) == 1


def test_faults_are_counted_between_the_polls() -> None:
    clock = VirtualClock()
    model = telemetry(clock)
    model.registry.add("validation_failures", 7, "request")
    polls = [snapshot(model)]
    model.registry.add("validation_failures", 3, "request")
    model.registry.add("client_retries", 2)
    model.errors["context_length_exceeded"] = 3
    polls.append(snapshot(model))
    reading = reading_from_stats("u", polls, seconds=20)
    assert reading.faults.validation_failures == 3 and reading.faults.num_retries == 2
    assert reading.faults.errors == {"context_length_exceeded": 3}


def test_long_prompts_under_way_are_seen_beside_short_ones() -> None:
    """None of the short ones has ended: the long one stands in their way."""
    clock = VirtualClock()
    model = telemetry(clock)
    for name, length in (("a", 16), ("b", 16), ("long", 1500), ("next", 1500)):
        begin(model, name, num_prompt=length)
    reading = reading_from_stats("u", [snapshot(model)], seconds=20)
    assert (reading.lengths.short_prompt, reading.lengths.longest_prompt) == (16, 1500)


def test_prefixes_of_the_last_prompts_are_tokens_sent_again() -> None:
    """24 of 32 prompts share 200 tokens: 23 · 200 / 32."""
    clock = VirtualClock()
    model = telemetry(clock)
    model.num_requests = 50
    model.prompts.shared_prefixes = [
        PrefixSharing(
            requests=24,
            shared_tokens=200,
            median_length=220,
            looks_like="a date",
            alike_after=0,
            text="24 requests share their first 200 tokens.",
            outliers=[],
        )
    ]
    reading = reading_from_stats("u", [snapshot(model)], seconds=20)
    assert reading.prefix.shared_tokens == pytest.approx(23 * 200 / 32)
    assert reading.prefix.shared_text == "24 requests share their first 200 tokens"


def test_an_engine_that_never_ran_gives_a_reading() -> None:
    clock = VirtualClock()
    model = telemetry(clock)
    clock.advance(30)
    result = diagnose(reading_from_stats("u", [snapshot(model)], seconds=20))
    assert result.bottleneck.name == "under-loaded"
    assert any("none ended" in text for text in result.not_known)


# ── /metrics ────────────────────────────────────────────────────────────────────────────────────

LABELS = '{engine="0",model_name="llama"}'


def vllm_text(done: int, running: int = 4, waiting: int = 0, usage: float = 0.3) -> str:
    """What a server says that has answered `done` requests: 2 s queue, 1 s prefill, 4 s decode."""
    lines = [
        f"vllm:num_requests_running{LABELS} {running}.0",
        f"vllm:num_requests_waiting{LABELS} {waiting}.0",
        f"vllm:gpu_cache_usage_perc{LABELS} {usage}",
        "# TYPE vllm:prefix_cache_queries counter",
        f"vllm:prefix_cache_queries_total{LABELS} {done * 100}.0",
        "# TYPE vllm:prefix_cache_hits counter",
        f"vllm:prefix_cache_hits_total{LABELS} {done * 25}.0",
        "# TYPE vllm:num_preemptions counter",
        f"vllm:num_preemptions_total{LABELS} {done}.0",
        "# TYPE vllm:request_success counter",
        f'vllm:request_success_total{{model_name="llama",finished_reason="stop"}} {done}.0',
    ]
    for name, seconds in (
        ("time_to_first_token_seconds", 3.0),
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 1.0),
        ("e2e_request_latency_seconds", 7.0),
        ("time_per_output_token_seconds", 0.04),
    ):
        lines.append(f"# TYPE vllm:{name} histogram")
        for bound in (0.01, 0.1, 1.0, 5.0, 10.0, "+Inf"):
            count = done if float(bound) >= seconds else 0
            lines.append(f'vllm:{name}_bucket{{model_name="llama",le="{bound}"}} {count}.0')
        lines.append(f"vllm:{name}_count{LABELS} {done}.0")
        lines.append(f"vllm:{name}_sum{LABELS} {done * seconds}")
    return "\n".join(lines) + "\n"


def test_metrics_are_told_by_what_they_grew() -> None:
    scrapes = [parse_scrape(vllm_text(100)), parse_scrape(vllm_text(140, waiting=30, usage=0.98))]
    reading = reading_from_metrics("u", scrapes, seconds=20, transfer_s=0.01, price_per_hour=2)
    assert reading.load.num_ended == 40 and reading.load.finished_per_s == 2
    assert reading.latency.ttft.mean == pytest.approx(3) and 1 < reading.latency.ttft.p50 <= 5
    assert reading.latency.itl.mean == pytest.approx(0.04), "the older name is read"
    assert reading.queue_s == pytest.approx(2) and reading.prefill_s == pytest.approx(1)
    assert reading.kv.usage_max == 0.98 and reading.kv.num_preemptions == 40
    assert reading.prefix.hit_rate == pytest.approx(0.25)
    assert reading.load.arrivals_per_s == pytest.approx((40 + 30) / 20)
    assert reading.server == "vllm metrics of llama" and reading.not_known


def test_a_full_server_is_told_by_its_metrics_alone() -> None:
    scrapes = [parse_scrape(vllm_text(n, waiting=30, usage=0.98)) for n in (100, 120, 140)]
    result = diagnose(reading_from_metrics("u", scrapes, seconds=20))
    assert result.bottleneck.name == "kv-capacity"
    assert result.tpot.floor_s is None and "not known" in result.tpot.why_no_floor
    assert "the weights' bytes over the memory's bandwidth" in result.tpot.why_no_floor


def test_an_idle_server_is_told_by_its_metrics_alone() -> None:
    scrapes = [parse_scrape(vllm_text(100, running=0)) for _ in range(4)]
    assert diagnose(reading_from_metrics("u", scrapes, seconds=20)).bottleneck.name == (
        "under-loaded"
    )


def test_quantiles_lie_within_their_bucket() -> None:
    assert quantile([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(1.5)
    assert quantile([(1.0, 4.0), (float("inf"), 10.0)], 0.9) == 1.0, "beyond all bounds"


# ── a bench report ──────────────────────────────────────────────────────────────────────────────


def test_a_report_splits_ttft_with_the_servers_counters() -> None:
    """TTFT 100 ms at the client, 60 of queue and 30 of prefill at the server: 10 on the way."""
    run = run_of(steady(100, 0.1), 10.0)
    run.server.counters = {
        "request_queue_time_seconds_sum": 6.0,
        "request_queue_time_seconds_count": 100.0,
        "request_prefill_time_seconds_sum": 3.0,
        "request_prefill_time_seconds_count": 100.0,
    }
    reading = reading_from_report("r.json", build_report(run, "0"), price_per_hour=2.0)
    assert reading.latency.transfer_s == pytest.approx(0.01)
    assert reading.share_of_ttft(reading.queue_s) == pytest.approx(2 / 3)
    assert reading.spend.usd_per_million_output == pytest.approx(2 / 3600 / 110 * 1e6, rel=0.01)


def test_a_report_without_server_metrics_says_so() -> None:
    result = diagnose(reading_from_report("r", build_report(run_of(steady(50, 0.1), 5.0), "0")))
    assert any("/metrics" in text for text in result.not_known)
    assert result.ttft.queue_s is None and result.ttft.mean_s == pytest.approx(0.1)


def test_shared_prefixes_of_a_report_are_a_cold_cache() -> None:
    prompts = [[*range(300), *range(1000 + 20 * i, 1020 + 20 * i)] for i in range(40)]
    exchanges = steady(40, 1.0, ttft_s=lambda i: 0.9, tokens=3, prompt_tokens=320)
    report = build_report(run_of(exchanges, 40.0), "0", sharing=find_shared_prefixes(prompts))
    reading = reading_from_report("r.json", report)
    assert reading.prefix.shared_tokens == pytest.approx(39 * 300 / 40)
    result = diagnose(reading)
    assert result.bottleneck.name == "cold-cache"
    assert "300 tokens" in " ".join(result.bottleneck.evidence)


def test_a_late_client_is_named_before_the_server() -> None:
    exchanges = steady(50, 0.1)
    for x in exchanges:
        x.sent_s = x.scheduled_s + 0.05
    result = diagnose(reading_from_report("r", build_report(run_of(exchanges, 5.0), "0")))
    assert result.bottleneck.name == "client-bottleneck"


# ── around them ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://serve.example/", "https://serve.example"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    assert base_url(url) == address


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError):
        base_url(url)


def test_a_datasheet_row_is_found_by_name_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "sheets.csv"
    file.write_text(
        "accelerator,mem_gb,mem_bw_gbs,bf16_dense_tflops\n"
        "X100-SXM-40GB,40,1000,300\nX100-SXM-80GB,80,2000,300\nY7,24,600,\n"
    )
    sheets = read_sheets(str(file))
    assert find_sheet("Maker X100-SXM", sheets, 79.0).bandwidth_gb_per_s == 2000
    assert find_sheet("Maker Y7", sheets, 24.0).bf16_tflops is None
    assert find_sheet("AMD EPYC 7763", sheets, 24.0) is None
    file.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no column accelerator"):
        read_sheets(str(file))


def test_the_shared_datasheets_are_read(shared: Path) -> None:
    sheets = read_sheets(str(shared / "hardware" / "accelerators.csv"))
    result = find_sheet("NVIDIA H200", sheets, 141.0)
    assert result is not None and result.name.startswith("H200") and result.bf16_tflops == 989.4
