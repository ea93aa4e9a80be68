"""`headway bench` against a server of known delays, and against the real one."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, headway
from sent_requests import sent_as

from conftest import StartServer
from fake_openai import FakeServer
from headway.bench import trial
from headway.bench.latency import latency
from headway.bench.report import BenchReport
from headway.bench.traces import read_trace, spread_quantized
from headway.config.options import BenchOptions
from headway.core.errors import UsageError

SLACK_S = 0.5
"""Nothing here asserts that a busy machine is quick; tests/system/test_bench_precise.py does."""


def bench(url: str, **options: Any) -> BenchReport:
    """One run in this process."""
    chosen = BenchOptions(**({"input_len": "20", "output_len": "10"} | options))
    return asyncio.run(trial.run_once(url, chosen, "0", None))


def passed(report: BenchReport) -> dict[str, bool | None]:
    """Check → outcome, without the one that depends on how busy this machine is."""
    return {c.name: c.passed for c in report.checks if "client" not in c.name}


def test_every_latency_is_what_the_server_did() -> None:
    """The medians: a machine that is busy elsewhere holds up some, which are its own truth."""
    with FakeServer(ttft=0.1, itl=0.02) as fake:
        report = bench(fake.url, rate=20.0, duration=2.0, output_len="uniform:5-15")
        truth = fake.truth()
    assert report.counts.ok == len(truth) == len(report.run.exchanges) > 20
    assert not [name for name, ok in passed(report).items() if ok is False]
    figures = report.figures
    assert figures.ttft_s is not None and figures.tpot_s is not None and figures.itl_s is not None
    assert 0.1 <= figures.ttft_s.p50 < 0.1 + SLACK_S
    spans = [(t["sent_s"][-1] - t["sent_s"][0]) / (t["max_tokens"] - 1) for t in truth]
    assert figures.tpot_s.p50 == pytest.approx(np.median(spans), rel=0.5)
    asked = sorted(t["max_tokens"] for t in truth)
    assert sorted(x.num_output for x in report.run.exchanges) == asked
    assert figures.itl_s.count == sum(asked) - len(asked)
    whole = np.median([t["sent_s"][-1] - t["arrived_s"] for t in truth])
    assert figures.e2e_s is not None and whole * 0.9 <= figures.e2e_s.p50 < whole + SLACK_S


def test_several_tokens_in_a_chunk_are_several_gaps() -> None:
    with FakeServer(ttft=0.05, itl=0.01, per_chunk=4, first_alone=True) as fake:
        report = bench(fake.url, rate=20.0, duration=1.0, output_len="9")
    assert all(x.chunk_tokens == [1, 4, 4] for x in report.run.exchanges)
    timed = latency(report.run.exchanges[0])
    assert timed is not None and timed.exact
    assert [gap == 0.0 for gap in timed.gaps_s] == [False, True, True, True] * 2
    assert passed(report)["sum of ITLs = e2e − TTFT, ITLs = tokens − 1"] is True


def test_a_server_that_knows_only_openais_fields_is_measured_too() -> None:
    with FakeServer(ttft=0.02, itl=0.005, per_chunk=2, plain=True) as fake:
        report = bench(fake.url, rate=20.0, duration=1.0)
    assert report.run.server.features == ["stream_options"]
    assert report.figures.itl_s is None and report.figures.chunk_gap_s is not None
    assert {x.num_output for x in report.run.exchanges} == {10}
    with FakeServer(ttft=0.02, no_usage=True, plain=True) as fake:
        report = bench(fake.url, rate=20.0, duration=0.5)
    assert {x.num_prompt for x in report.run.exchanges} == {20}


def test_faults_are_counted_by_reason() -> None:
    with FakeServer(ttft=0.01, itl=0.002, refuse_every=3, drop_every=5) as fake:
        report = bench(fake.url, arrivals="constant", rate=30.0, num_requests=30)
    assert report.counts.reasons == {"status 503": 10, "dropped": 4}
    assert (report.counts.refused, report.counts.errors) == (10, 4)
    assert report.counts.ok == 16
    with FakeServer(ttft=0.01, itl=1.0) as fake:
        report = bench(fake.url, rate=20.0, num_requests=5, timeout=1.2, slo=["ttft=9s"])
    assert report.counts.timeouts == 5 and report.rates.goodput_per_s == 0.0


def test_a_server_that_reads_slowly_delays_the_first_token() -> None:
    with FakeServer(ttft=0.01, slow_read=0.3) as fake:
        report = bench(fake.url, arrivals="constant", rate=2.0, num_requests=2, input_len="5000")
    assert report.figures.ttft_s is not None and report.figures.ttft_s.max >= 0.3


def test_an_open_loop_shows_a_stall_and_a_closed_one_hides_it() -> None:
    """Coordinated omission: the server stalls 1 of 4 s."""
    stall = {"ttft": 0.02, "itl": 0.001, "stall_at": 1.0, "stall_for": 1.0}
    with FakeServer(**stall) as fake:
        opened = bench(fake.url, arrivals="constant", rate=20.0, duration=4.0).figures
    with FakeServer(**stall) as fake:
        closed = bench(fake.url, concurrency=1, duration=4.0).figures
    assert opened.ttft_s and closed.ttft_s and closed.e2e_s
    assert opened.ttft_s.p90 > 0.5
    assert closed.e2e_s.p90 < opened.ttft_s.p90 / 3
    assert closed.e2e_s.max > 0.5, "one request met the stall, and only one"


def test_a_closed_loop_is_labelled_and_keeps_its_number() -> None:
    with FakeServer(ttft=0.05, itl=0.005) as fake:
        report = bench(fake.url, concurrency=4, num_requests=40)
        truth = fake.truth()
    assert (report.run.load.loop, report.saturation.over_saturated) == ("closed", None)
    spans = [(t["arrived_s"], t["sent_s"][-1]) for t in truth]
    most = max(sum(a <= at < b for a, b in spans) for at, _ in spans)
    assert len(truth) == 40 and 2 <= most <= 4


def test_classes_are_told_to_a_server_that_takes_them() -> None:
    slos = ["fast:ttft=5s", "slow:ttft=1ms"]
    with FakeServer(ttft=0.02) as fake:
        report = bench(fake.url, rate=40.0, duration=1.0, slo=slos, share=["fast=3", "slow=1"])
    assert "service_class" in report.run.server.features
    fast, slow = report.classes["fast"], report.classes["slow"]
    assert (fast.rates.attainment, slow.rates.attainment) == (1.0, 0.0)
    assert slow.missed == {"ttft": slow.counts.counted}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_conversation_grows_by_what_was_answered(endpoint: str) -> None:
    with FakeServer(ttft=0.01) as fake:
        report = bench(
            fake.url,
            endpoint=endpoint,
            workload="chat",
            turns="3",
            rate=10.0,
            num_requests=5,
            prefix_len=30,
            think_time=0.05,
        )
    assert len(report.run.exchanges) == 15
    for x in report.run.exchanges:
        assert x.num_prompt == 30 + 20 * (x.turn + 1) + 10 * x.turn
        assert x.asked_prompt_tokens == x.num_prompt
    (sharing,) = report.sharing
    assert sharing.requests == 5
    turns = {(x.conversation, x.turn): x for x in report.run.exchanges}
    for (talk, turn), x in turns.items():
        if turn:
            ended_s = turns[talk, turn - 1].ended_s
            assert ended_s is not None and x.scheduled_s >= ended_s


@pytest.mark.parametrize(
    ("kind", "file", "seconds"),
    [
        ("azure", "azure2023_code/AzureLLMInferenceTrace_code.csv", 3.0),
        ("mooncake", "mooncake_conversation/conversation_trace.jsonl", 1.0),
    ],
)
def test_a_trace_is_replayed_as_it_is(shared: Path, kind: str, file: str, seconds: float) -> None:
    path = shared / "traces" / file
    with FakeServer(per_chunk=10**6) as fake:
        report = bench(
            fake.url, workload=f"{kind}:{path}", speed=60.0, duration=seconds, timeout=60.0
        )
        truth = fake.truth()
    assert report.counts.failed == 0
    rows = read_trace(kind, path)
    rng = np.random.default_rng([0, *b"default"])
    rows, _ = spread_quantized(rows, rng)
    inside = [row for row in rows if row.at_s / 60 < seconds]
    assert len(report.run.exchanges) == len(inside) > 50
    sent_as(inside, report, truth)
    scheduled = sorted(x.scheduled_s for x in report.run.exchanges)
    assert scheduled == pytest.approx([row.at_s / 60 for row in inside])


def test_a_traces_blocks_are_shared_on_the_wire(shared: Path) -> None:
    path = shared / "traces" / "mooncake_conversation" / "conversation_trace.jsonl"
    with FakeServer(per_chunk=10**6, keep_prompts=True) as fake:
        bench(
            fake.url, workload=f"mooncake:{path}", num_requests=30, speed=600.0, scale_length=2000
        )
        prompts = [t["prompt"] for t in fake.truth()]
    block = int(512 * 2000 / 126_195)  # about: the longest of the trace fits 2000
    assert len(prompts) > 5
    assert len({tuple(p[: block - 1]) for p in prompts}) == 1, "all begin with block 0"
    assert len({tuple(p) for p in prompts}) == len(prompts)


def test_prompts_of_words_are_as_long_as_asked() -> None:
    with FakeServer(ttft=0.01) as fake:
        report = bench(fake.url, prompt_format="text", input_len="100", num_requests=5, rate=50.0)
    assert {x.num_prompt for x in report.run.exchanges} == {100}


def test_a_date_in_the_system_prompt_is_found(tmp_path: Path) -> None:
    rule = "Answer briefly and kindly, name your sources, and never guess. " * 3
    lines = [f"It is 2026-11-{10 + i % 9} now. {rule} Question {i * 7919}?" for i in range(20)]
    lines[7] = lines[7].replace("never guess", "ask Ada first", 1)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(lines))
    with FakeServer(ttft=0.01) as fake:
        report = bench(fake.url, workload=f"prompts:{file}", rate=100.0, num_requests=20)
    (sharing, *_) = report.sharing
    assert (sharing.requests, sharing.looks_like, sharing.unit) == (20, "a date", "words")
    assert sharing.alike_after > 50 and "cannot be reused" in sharing.sentence


def test_the_search_finds_what_a_server_can_do() -> None:
    """Four places of 0.1 s each serve 40 requests per second."""
    with FakeServer(ttft=0.1, places=4) as fake:
        report = asyncio.run(
            trial.find_goodput(
                fake.url,
                BenchOptions(
                    input_len="20",
                    output_len="3",
                    arrivals="constant",
                    rate=10.0,
                    duration=1.0,
                    slo=["ttft=600ms"],
                    find_goodput=True,
                ),
                "0",
                None,
            )
        )
    search = report.goodput_search
    assert search is not None and search.best_rate is not None
    assert 10 < search.best_rate < 80, "far from the knee only on a machine that is very busy"
    assert {p.meets_slo for p in search.points} == {True, False}
    assert "requests/s is the highest rate found" in search.note


def test_nobody_there_is_said_in_two_lines() -> None:
    with contextlib.closing(socket.socket()) as bound:  # nobody else has it, and nobody listens
        bound.bind(("127.0.0.1", 0))
        done = headway("bench", f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert done.returncode == 2 and "cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "takes one URL or model"),
        (["ftp://x"], "is neither a URL nor a model"),
        (["http://x", "--quantization=int8"], "--quantization is for a model that bench starts"),
        (["http://x", "--find-goodput"], "needs objectives"),
        (["http://x", "--concurrency=2", "--arrivals=gamma"], "one of them"),
        (["http://x", "--slo=ttft=9"], "'9' is not a duration"),
        (["http://x", "--warmup=20", "--cooldown=20"], "leave nothing of 30 s"),
        (["http://x", "--json=/no/such/folder/a.json"], "/no/such/folder/a.json"),
        (["http://x", "--words=locust"], "'locust'"),
        (["compare", "a.json"], "takes two reports"),
    ],
)
def test_wrong_use_is_told_before_any_request(arguments: list[str], words: str) -> None:
    done = headway("bench", *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_prompt_ids_cannot_go_into_messages() -> None:
    with FakeServer() as fake, pytest.raises(UsageError, match="chat takes messages"):
        bench(fake.url, endpoint="chat", prompt_format="ids", num_requests=1)


def test_the_real_server_is_measured_and_compared(server: LiveServer, tmp_path: Path) -> None:
    flags = ("--rate=10", "--num-requests=12", "--input-len=40", "--output-len=8")
    for name in ("a", "b"):
        done = headway(
            *("bench", server.url, *flags, "--slo=ttft=30s", f"--json={tmp_path / name}.json"),
            *(f"--csv={tmp_path / name}.csv", f"--html={tmp_path / name}.html"),
        )
        assert done.returncode == 0, done.stderr
        assert "100.0% met their objectives" in done.stdout
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["format"], report["version"]) == ("headway-bench", 1)
    assert report["counts"] == {
        **{"counted": 12, "ok": 12, "failed": 0, "timeouts": 0, "refused": 0, "errors": 0},
        **{"cut": 0, "reasons": {}},
    }
    checks = {c["name"]: c["passed"] for c in report["checks"]}
    assert checks["tokens in chunks = usage"] is True
    assert set(report["run"]["server"]["features"]) == {
        *("stream_options", "ignore_eos", "min_tokens", "return_token_ids")
    }
    assert (tmp_path / "a.csv").read_text().count("\n") == 13
    done = headway("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert done.returncode == 0 and "TTFT p50" in done.stdout


def test_a_model_is_served_measured_and_stopped() -> None:
    load = ("--num-requests=4", "--concurrency=2", "--input-len=20", "--output-len=6")
    done = headway("bench", "headway-tiny", *load, "--kv-memory=64MiB", "--max-num-seqs=3")
    assert done.returncode == 0, done.stderr
    assert "Starting a server of headway-tiny" in done.stderr and "4 requests" in done.stdout
    done = headway("bench", "headway-tiny", *load, "--kv-memory=1KiB")
    assert done.returncode == 1 and "ended with status" in done.stderr


def test_a_chat_with_the_real_server(server: LiveServer) -> None:
    report = bench(
        server.url, endpoint="chat", workload="chat", turns="2", num_requests=3, prefix_len=12
    )
    assert report.counts.ok == 6
    assert not [name for name, ok in passed(report).items() if ok is False]


def test_dry_run_says_what_would_be_sent() -> None:
    done = headway("bench", "http://nowhere", "--dry-run", "--num-requests=7", "--output-len=3")
    assert done.returncode == 0, done.stderr
    assert "default: synthetic, 7 conversations of 7 requests" in done.stdout
    assert "21 answer tokens" in done.stdout


def test_mooncake_runs_scaled_on_a_small_model(
    start_server: StartServer, stories: Path, shared: Path
) -> None:
    live = start_server(folder=stories).wait_ready()
    path = shared / "traces" / "mooncake_conversation" / "conversation_trace.jsonl"
    report = bench(live.url, workload=f"mooncake:{path}", speed=3.0, scale_length=500, duration=4.0)
    assert report.counts.failed == 0 and report.counts.ok > 10
    assert not [name for name, ok in passed(report).items() if ok is False]
    assert max(x.num_prompt + x.num_output for x in report.run.exchanges) <= 500
