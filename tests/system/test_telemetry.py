"""A real server tells of itself: /stats, /metrics, /trace, timings, objectives by class."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from door_cases import ask as send
from live_server import NO_TORCH, PATIENT, Hold, LiveServer, headway, wait_until
from prometheus_client.parser import text_string_to_metric_families

from conftest import StartServer
from headway.telemetry.snapshot import Now, Snapshot

BODY = {"prompt": [10, 20, 30, 40], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def ask(live: LiveServer, **more: Any) -> dict[str, Any]:
    status, answer = live.post("/v1/completions", {"model": live.model, **BODY, **more})
    assert status == 200, answer
    return answer


def stats(live: LiveServer) -> Snapshot:
    status, data = live.get("/stats")
    assert status == 200, data
    return msgspec.json.decode(data, type=Snapshot)


PRICED = (
    *("--kv-memory=64MiB", "--slo=ttft=60s,tpot=60s", "--slo=hasty:ttft=1us"),
    *("--price-per-hour=2", "--metrics-prefix=vllm"),
)


@pytest.fixture(scope="module")
def priced(tiny_model: Path) -> Any:
    """A server with classes, a price, and vLLM's metric names."""
    live = LiveServer(tiny_model, *PRICED)
    try:
        yield live.wait_ready()
    finally:
        live.close()


def test_stats_after_some_requests(start_server: StartServer) -> None:
    """The windows of a server that has had no other requests; they may be a moment old."""
    live = start_server(*PRICED).wait_ready()
    before = stats(live).totals
    for _ in range(3):
        ask(live)
    ask(live, service_class="hasty")
    wait_until(lambda: stats(live).windows[1].latency["ttft"].count == 4)
    found = stats(live)
    assert found.status == "ready" and found.model.names == ["tiny"]
    assert found.machine.bandwidth_bytes_per_s > 1e8 and found.machine.flops_per_s > 1e8
    assert found.machine.flops_dtype == "float32" and found.machine.cache_resident
    assert found.kernels["linear"][0] and found.limits.max_num_seqs > 0
    assert found.totals.requests == before.requests + 4
    assert found.totals.generation_tokens == before.generation_tokens + 32
    assert found.totals.prompt_tokens == before.prompt_tokens + 16
    window = found.windows[1]
    by_name = {entry.name: entry for entry in window.classes}
    assert by_name["hasty"].missed == {"ttft": by_name["hasty"].num_judged}
    assert by_name["default"].attainment == 1.0 and window.goodput_per_s > 0
    assert window.latency["itl"].count == 7 * window.latency["ttft"].count
    assert window.latency["queue"].p50 + window.latency["prefill"].p50 <= (
        window.latency["e2e"].p99
    )
    assert window.steps.count >= 8 and window.decode.mfu > 0 and window.decode.mbu is None
    assert window.cost.usd_per_million_tokens > 0 and window.verdict.text
    assert len(found.steps) >= 8 and found.now.num_requests == 0


def test_metrics_with_vllms_names(priced: LiveServer) -> None:
    ask(priced)
    status, data = priced.get("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(data.decode())}
    assert status == 200 and all(name.startswith("vllm:") for name in families)
    (running,) = families["vllm:num_requests_running"].samples
    assert running.labels == {"model_name": "tiny", "engine": "0"}
    assert families["vllm:generation_tokens"].samples[0].value >= 8


def test_the_terminal_has_a_line_for_each_request(priced: LiveServer) -> None:
    """The answer's id, what was refused, and where each came from; written aside, so we wait."""
    answer = ask(priced)
    invalid = b'{"model": "tiny", "prompt": "x", "temperature": 9}'
    headers = {"x-request-id": "job-7"}
    status, headers, _ = send(priced, "POST", "/v1/completions", headers, invalid)
    assert status == 400

    def lines(request_id: str) -> list[str]:
        written = [line for line in priced.stderr.splitlines() if " headway.requests " in line]
        return [line for line in written if f" {request_id} " in line]

    wait_until(lambda: lines(answer["id"]) and lines(headers["x-request-id"]))
    (ended,) = lines(answer["id"])
    (refused,) = lines(headers["x-request-id"])
    assert f" INFO headway.requests {answer['id']} 200 default " in ended
    assert " cached, queue " in ended and " TTFT " in ended and " TPOT " in ended
    assert ended.endswith("; POST /v1/completions")
    assert " 400 default 0+0 tokens, 0 cached, invalid: decimal_above_max_value; " in refused
    assert refused.endswith("; POST /v1/completions, client job-7")


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_timings_come_with_the_answer(priced: LiveServer, chat: bool, stream: bool) -> None:
    with openai.OpenAI(base_url=priced.url + "/v1", api_key="none", max_retries=0) as client:
        options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": stream}
        options["extra_body"] = {"timings": True, "ignore_eos": True}
        started = time.perf_counter()
        if chat:
            messages: Any = [{"role": "user", "content": "What is 2 + 3?"}]
            answer: Any = client.chat.completions.create(messages=messages, **options)
        else:
            answer = client.completions.create(prompt="Once upon", **options)
        last = list(answer)[-1] if stream else answer
        spent_s = time.perf_counter() - started
    found = last.timings
    assert found.keys() == {
        "queue_s", "prefill_s", "ttft_s", "publish_s", "tpot_s", "e2e_s", "cached_tokens",
        "preemptions",
    }  # fmt: skip
    assert found["queue_s"] <= found["publish_s"] <= spent_s
    assert 0 <= found["queue_s"] <= found["ttft_s"] <= found["e2e_s"] <= spent_s
    assert found["queue_s"] + found["prefill_s"] == pytest.approx(found["ttft_s"], abs=1e-4)
    assert found["ttft_s"] + 5 * found["tpot_s"] == pytest.approx(found["e2e_s"], abs=1e-6)


def test_no_timings_unless_asked(priced: LiveServer) -> None:
    assert "timings" not in ask(priced)


def test_usage_and_timings_share_the_last_chunk(priced: LiveServer) -> None:
    with openai.OpenAI(base_url=priced.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model="tiny", prompt="Once", max_tokens=3, stream=True,
                stream_options={"include_usage": True}, extra_body={"timings": True},
            )
        )  # fmt: skip
    assert chunks[-1].usage.completion_tokens >= 1 and chunks[-1].timings["e2e_s"] > 0
    assert all(not hasattr(chunk, "timings") for chunk in chunks[:-1])


def test_objectives_of_one_request(priced: LiveServer) -> None:
    before = stats(priced).totals
    ask(priced, slo={"ttft": "1us"})
    ask(priced, slo={"e2e_ms": 60_000}, service_class="hasty")
    ask(priced, service_tier="flex")
    after = stats(priced).totals
    assert after.slo_missed == before.slo_missed + 1 and after.slo_met == before.slo_met + 2


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("slo", {"ttft": 5}, "slo"),
        ("slo", {"speed": "5ms"}, "slo"),
        ("slo", "ttft=5ms", "slo"),
        ("service_class", "silver", "service_class"),
        ("service_class", 5, "service_class"),
        ("timings", "yes", "timings"),
    ],
)
def test_wrong_fields_are_refused_and_counted(
    priced: LiveServer, field: str, value: Any, param: str
) -> None:
    before = stats(priced).totals.validation_failures.get("request", 0)
    status, answer = priced.post("/v1/completions", {"model": "tiny", **BODY, field: value})
    assert (status, answer["error"]["param"]) == (400, param)
    assert stats(priced).totals.validation_failures["request"] == before + 1


def test_a_client_that_tries_again_is_counted(priced: LiveServer) -> None:
    before = stats(priced).totals.client_retries
    with openai.OpenAI(base_url=priced.url + "/v1", api_key="none") as client:
        headers = {"x-stainless-retry-count": "1"}
        client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_headers=headers)
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert stats(priced).totals.client_retries == before + 1


def test_running_requests_are_listed(start_server: StartServer) -> None:
    """Eight answers on the null executor, two at a time: they run or wait, and tokens grow.

    The engine is stopped until all of them are there, and while we look; the first two are long.
    """
    live = start_server(NO_TORCH, "--max-num-seqs=2", PATIENT).wait_ready()
    engine = live.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        answers = []
        for num_tokens in (400, 400, *[20] * 6):
            answers.append(pool.submit(ask, live, max_tokens=num_tokens))
            wait_until(lambda: len(stats(live).now.requests) == len(answers))

        def queued() -> Now | None:
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(engine, signal.SIGSTOP)
            now = stats(live).now
            decoding = any(request.state == "decode" for request in now.requests)
            return now if now.num_waiting >= 5 and decoding else None

        found = wait_until(queued)
        os.kill(engine, signal.SIGCONT)
        states = [request.state for request in found.requests]
        assert states.count("waiting") >= 5 and "decode" in states
        assert found.num_running == 2 and found.kv_groups[0].blocks_used > 0
        ages = [request.age_s for request in found.requests]
        assert ages == sorted(ages, reverse=True)
        running = next(r for r in found.requests if r.state == "decode")
        assert running.computed_tokens == 4 + running.generated_tokens - 1
        assert [len(answer.result()["choices"]) for answer in answers] == [1] * 8

    def counted() -> Snapshot | None:
        found = stats(live)  # its windows may be a moment old
        return found if found.windows[1].latency["queue"].count == 8 else None

    done = wait_until(counted)
    assert done.now.requests == [] and done.windows[1].latency["queue"].p99 > 0.5
    assert done.windows[0].verdict.kind in ("capacity", "contention"), done.windows[0].verdict


def test_preemptions_are_seen_by_the_request(start_server: StartServer) -> None:
    live = start_server("--kv-memory=48KiB", "--max-num-seqs=4", "--block-size=4").wait_ready()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, live, max_tokens=40, timings=True) for _ in range(4)]
        answers = [job.result() for job in jobs]
    total = stats(live).totals.preemptions
    assert total > 0
    assert sum(answer["timings"]["preemptions"] for answer in answers) == total


def test_a_refusal_before_the_engine_is_ready_is_counted(
    start_server: StartServer, hold: Hold
) -> None:
    live = start_server(NO_TORCH, env=hold.env).wait_ready()
    hold.on()
    os.kill(live.engine_pid(), signal.SIGKILL)
    wait_until(lambda: not live.is_ready())
    status, _ = live.post("/v1/completions", {"model": live.model, **BODY})
    assert status == 503
    hold.off()
    wait_until(live.is_ready)
    totals = stats(live).totals
    assert sum(totals.admission_rejections.values()) == 1 and totals.engine_restarts == 1
    assert live.metric("slo_missed_total", which="refused") == 1


def test_where_prompts_part_is_said_without_their_text(start_server: StartServer) -> None:
    live = start_server(NO_TORCH).wait_ready()
    shared = "You answer questions about gardens, trees and the sea, slowly and kindly. "
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        for day in ("2026-11-20", "2025-03-17", "2024-08-02"):
            client.completions.create(
                model=live.model, prompt=f"{shared}Today is {day}. Where is the ball?", max_tokens=1
            )
    (found,) = stats(live).prefixes
    assert found.requests == 3 and found.shared_tokens > 20 and "3 requests share" in found.text
    assert found.looks_like == "a date" and found.alike_after > 0
    assert b"gardens" not in live.get("/stats")[1]


def test_trace_is_written_for_perfetto(priced: LiveServer, tmp_path: Path) -> None:
    ask(priced)
    out = tmp_path / "trace.json"
    done = headway("doctor", "--trace", priced.url, out, "--seconds", "60")
    assert done.returncode == 0 and "ui.perfetto.dev" in done.stdout, done.stderr
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"schedule", "forward", "sample", "update", "queue", "prefill", "decode"} <= names


def test_spans_reach_a_collector(start_server: StartServer) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="the extra otel is not installed")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        live = start_server(NO_TORCH, f"--otlp-endpoint={endpoint}").wait_ready()
        ask(live)
        wait_until(lambda: received)
        collector.shutdown()
    path, body = received[0]
    assert path == "/v1/traces" and b"llm_request" in body and b"prefill" in body


@pytest.mark.parametrize("query", ["?seconds=0", "?seconds=nan", "?seconds=1e9", "?seconds=x"])
def test_a_wrong_trace_is_refused(priced: LiveServer, query: str) -> None:
    status, data = priced.get("/trace" + query)
    assert status == 400 and msgspec.json.decode(data)["error"]["param"] == "seconds"


def test_trace_explains_what_went_wrong(tmp_path: Path) -> None:
    done = headway("doctor", "--trace", "http://127.0.0.1:9", tmp_path / "x.json")
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert headway("doctor", "--trace", "nonsense", tmp_path / "x.json").returncode == 2
    assert headway("doctor", "--trace", "http://127.0.0.1:9").returncode == 2


@pytest.mark.parametrize("path", ["/stats", "/trace", "/calibration", "/metrics"])
def test_they_want_the_key(start_server: StartServer, path: str) -> None:
    live = start_server(NO_TORCH, "--api-key=sesame").wait_ready()
    assert live.get(path)[0] == 401


@pytest.mark.parametrize("slo", ["ttft=soon", "speed=5ms", "ttft=5", "a b:ttft=5ms"])
def test_a_wrong_slo_flag_stops_the_start(tiny_model: Path, slo: str) -> None:
    done = headway("serve", tiny_model, "--port=0", f"--slo={slo}")
    assert done.returncode == 2 and "SLO" in done.stderr


def test_prompts_are_in_none_of_it(start_server: StartServer) -> None:
    live = start_server().wait_ready()
    canary = "zanzibar quokka marmalade"
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        client.completions.create(model=live.model, prompt=canary, max_tokens=4)
    for path in ("/stats", "/metrics", "/trace?seconds=60"):
        assert b"quokka" not in live.get(path)[1]
