"""The doctor names the planted bottleneck: real servers, real load, `headway doctor` beside it.

A machine that is busy with other work is told as such, rightly; `planted` passes over that, since
the tests themselves run on such machines.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_server import LiveServer, headway
from staged import (
    HEAVY_FLAGS,
    FakeMetrics,
    ask_doctor,
    body,
    both,
    closed_loop,
    diagnose_under,
    open_loop,
    slow_reader,
    under,
    write_heavy_model,
)

from conftest import StartServer
from headway.telemetry.snapshot import Snapshot

GIVEN_UP_AFTER = 20
"""Diagnoses until a state is seen that we wait for; each takes some seconds."""
FIRST = ("host-bound", "slow-forward", "contention")
OF_THE_MACHINE = {"contention", "slow-forward", "client-bottleneck"}


@pytest.fixture(scope="module")
def light(tiny_model: Path) -> Iterator[LiveServer]:
    """A server of its own, so that windows hold no other test's requests."""
    live = LiveServer(
        tiny_model,
        "--served-model-name=tiny",
        "--kv-memory=64MiB",
        "--price-per-hour=2",
        "--max-queue-wait=1m",
    )
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Weights that no cache holds."""
    folder = write_heavy_model(tmp_path_factory.mktemp("models") / "heavy")
    live = LiveServer(folder, "--served-model-name=tiny", *HEAVY_FLAGS)
    try:
        yield live.wait_ready()
    finally:
        live.close()


def planted(diagnosis: dict[str, Any]) -> str:
    """The most valuable finding that is not about a busy machine; being idle comes last."""
    found = [each for each in diagnosis["findings"] if each["name"] not in OF_THE_MACHINE]
    found.sort(key=lambda each: (each["name"] == "under-loaded", -each["share"]))
    return found[0]["name"] if found else "healthy"


def finding(diagnosis: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in diagnosis["findings"] if each["name"] == name)


async def test_idle(light: LiveServer) -> None:
    found = await diagnose_under(light, open_loop(1.0, lambda i: body(20, 5, i)), seconds=4)
    assert planted(found) == "under-loaded", found["findings"]
    assert found["bottleneck"]["server_kind"] in ("under-loaded", "contention")
    assert any("more replicas" in text for text in found["waste"])
    assert any("$" in text for text in finding(found, "under-loaded")["evidence"])


async def test_failing_validation(light: LiveServer) -> None:
    """Bodies that do not validate; answers off a schema will count in the same place."""
    load = both(
        open_loop(0.1, lambda i: body(20, 5, i)),
        open_loop(0.1, lambda i: {**body(20, 5, i), "temperature": 9}),
    )
    found = await diagnose_under(light, load, seconds=3)
    assert planted(found) == "validation", found["findings"]
    advice = finding(found, "validation")
    assert 0.3 < advice["share"] < 0.7
    assert any("above_max" in text for text in advice["evidence"]), advice


async def test_host_bound_tiny_model(light: LiveServer) -> None:
    found = await diagnose_under(light, closed_loop(4, lambda i: body(20, 60, i)), seconds=4)
    assert planted(found) == "host-bound", found["findings"]
    assert found["tpot"]["why_no_floor"].startswith("the weights stay in the CPU's cache")
    assert any("wait for the host" in text for text in found["waste"])
    outputs = next(each for each in found["savings"] if each["what"].startswith("answers"))
    assert outputs["seconds"] > 0 and outputs["usd_per_hour"] > 0
    assert outputs["note"] == "output length is a product decision"


async def test_slow_client(light: LiveServer) -> None:
    found = await diagnose_under(light, slow_reader(light.url), seconds=4, warm_s=3)
    assert planted(found) == "slow-client", found["findings"]
    assert any("no flag of the server" in text for text in found["waste"])


async def test_over_saturated_queue(start_server: StartServer) -> None:
    """Twelve times the clients that it has rows for: a queue, however fast the machine is."""
    small = start_server(
        *("--served-model-name=tiny", "--max-num-seqs=4", "--max-queue=64", "--max-queue-wait=10m"),
        "--slo=ttft=1ms",
    ).wait_ready()
    found = await diagnose_under(small, closed_loop(48, lambda i: body(20, 60, i)), seconds=4)
    assert planted(found) == "over-saturated", found["findings"]
    assert any("of the requests met their objectives" in each for each in evidence(found))
    assert any("quantization" in text and "queueing" in text for text in found["waste"])
    assert found["ttft"]["queue_s"] > found["ttft"]["prefill_s"]


async def test_a_queue_within_the_objectives_is_not_over_saturated(
    start_server: StartServer,
) -> None:
    small = start_server(
        *("--served-model-name=tiny", "--max-num-seqs=4", "--max-queue=64", "--max-queue-wait=10m"),
        "--slo=ttft=10m",
    ).wait_ready()
    found = await diagnose_under(small, closed_loop(48, lambda i: body(20, 60, i)), seconds=4)
    assert planted(found) == "queueing", found["findings"]
    assert any("100% of the requests met" in each for each in evidence(found))


def evidence(found: dict[str, Any]) -> list[str]:
    """What its findings show."""
    return [text for finding in found["findings"] for text in finding["evidence"]]


async def test_tiny_kv_pool(start_server: StartServer) -> None:
    small = start_server("--kv-memory=400KiB", "--served-model-name=tiny").wait_ready()
    found = await diagnose_under(small, closed_loop(24, lambda i: body(150, 60, i)), seconds=4)
    assert planted(found) == "kv-capacity", found["findings"]
    assert finding(found, "kv-capacity")["what_if"].startswith("kv_memory=")


async def test_decode_of_one_request_at_a_time(heavy: LiveServer) -> None:
    found = await diagnose_under(heavy, closed_loop(1, lambda i: body(8, 40, i)), seconds=4)
    assert planted(found) == "small-batch", found["findings"]
    tpot = found["tpot"]
    assert 0 < tpot["floor_s"] <= tpot["step_s"]
    names = [each["name"] for each in found["findings"]]
    narrower = finding(found, "weight-bytes")
    assert narrower["available"] and narrower["what_if"] == "quantization=int4"
    drafts = finding(found, "drafts")
    assert drafts["available"] and drafts["share"] > 0
    assert set(names) >= {"small-batch", "drafts", "weight-bytes"}


async def test_a_server_in_int4_is_not_told_to_round(start_server: StartServer) -> None:
    """Its own settings count, not the type of its checkpoint."""
    narrow = start_server("--quantization=int4", "--served-model-name=tiny").wait_ready()
    found = await diagnose_under(narrow, closed_loop(1, lambda i: body(8, 40, i)), seconds=2)
    assert not {"weight-bytes", "wide-weights"} & {each["name"] for each in found["findings"]}
    stats = msgspec.json.decode(narrow.get("/stats")[1], type=Snapshot)
    assert stats.settings["quantization"].startswith("int4")
    assert stats.model.step_weight_bytes <= min(stats.model.weight_choices.values())


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="this system has no /proc/stat")
async def test_others_on_the_cores(light: LiveServer) -> None:
    """Spinning processes beside a server that works: live, in the doctor and in /metrics."""
    spin = "import sys\nprint(flush=True)\nwhile True: pass"
    spinning = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        for _ in range(GIVEN_UP_AFTER):
            found = await diagnose_under(light, closed_loop(4, lambda i: body(20, 60, i)), 2)
            if found["bottleneck"]["name"] == "contention":
                break
        assert found["bottleneck"]["name"] == "contention", found["findings"]
        assert found["bottleneck"]["server_kind"] == "contention"
        evidence = finding(found, "contention")["evidence"]
        assert any("of the cores' time" in text for text in evidence)
        assert any("tasks for" in text for text in evidence)
    finally:
        for each in spinning:
            each.kill()
            each.communicate()


async def test_large_prefill(heavy: LiveServer) -> None:
    found = await diagnose_under(heavy, closed_loop(1, lambda i: body(400, 3, i)), seconds=6)
    assert planted(found) == "long-prefill", found["findings"]
    assert found["bottleneck"]["server_kind"] in ("compute", "host", "contention")


@pytest.mark.hardening
async def test_one_long_prompt_hogs(heavy: LiveServer) -> None:
    load = both(
        closed_loop(4, lambda i: body(16, 20, i)), closed_loop(1, lambda i: body(1500, 2, i))
    )
    found = await diagnose_under(heavy, load, seconds=12, warm_s=3)
    assert planted(found) == "hogging", found["findings"]
    assert "max_num_batched_tokens=" in finding(found, "hogging")["what_if"]


@pytest.mark.hardening
async def test_cold_cache(start_server: StartServer, tmp_path: Path) -> None:
    """Prompts that share 200 of 220 tokens, each computed as a whole: told by a bench report."""
    cold = start_server("--served-model-name=tiny", "--no-prefix-cache").wait_ready()
    report = tmp_path / "report.json"
    load = "--workload=shared-prefix --prefix-len=200 --input-len=20 --output-len=3 --warmup=0"
    done = await asyncio.to_thread(
        headway,
        *("bench", cold.url, *load.split(), "--concurrency=1", "--num-requests=12"),
        *("--cooldown=0", f"--json={report}"),
    )
    assert done.returncode == 0, done.stderr
    found = await ask_doctor(str(report), 1)
    assert planted(found) == "cold-cache", found["findings"]
    advice = finding(found, "cold-cache")
    assert advice["available"] and advice["what_if"].startswith("prefix=")


async def test_a_server_that_only_has_vllms_metrics() -> None:
    fake = FakeMetrics()
    try:
        found = await ask_doctor(fake.url, 2, "--price-per-hour=4")
    finally:
        await asyncio.to_thread(fake.shutdown)
        fake.server_close()
    assert found["source"] == "metrics" and found["server"] == "vllm metrics of far"
    assert planted(found) == "kv-capacity", found["findings"]
    assert found["ttft"]["queue_s"] == pytest.approx(6)
    assert found["ttft"]["transfer_s"] is not None
    assert any("no floor of TPOT" in text for text in found["not_known"])
    assert any("92% queueing" in text for text in found["waste"])


async def test_people_read_the_verdict_first(light: LiveServer) -> None:
    async with under(light, closed_loop(4, lambda i: body(20, 60, i))):
        done = await asyncio.to_thread(headway, "doctor", light.url, "--seconds=2")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Headway ") and len(lines) < 60
    assert any(lines[1].startswith(name) for name in FIRST), lines[1]
    words = ("Time to the first token", "Time per token", "symptom", "Would be a waste", "save")
    places = [done.stdout.index(word) for word in words]
    assert places == sorted(places)


def test_the_machine_and_a_models_plan(tiny_model: Path) -> None:
    done = headway("doctor", tiny_model, "--probe-seconds=0.4", "--kv-memory=1MiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_cores"] >= 1 and found["bandwidth_bytes_per_s"] > 1e8
    assert {"float32", "bfloat16"} <= found["flops_per_s"].keys()
    assert {"linear", "attention"} <= {each["name"] for each in found["kernels"]}
    assert {"kv_blocks", "max_model_len"} <= {each["name"] for each in found["plan"]}
    assert found["kv_groups"] == [
        {
            "kind": "full",
            "window": 0,
            "num_layers": 2,
            "bytes_per_token": 512,
            "slot_bytes": 0,
        }
    ]
    shown = headway("doctor", tiny_model, "--probe-seconds=0")
    assert "not measured" in shown.stdout and "kv_blocks" in shown.stdout


def test_the_machine_alone() -> None:
    """Every measured row, the kernels with their reasons, no verdict and no plan; on all cores."""
    shown = headway("doctor", "--machine", "--probe-seconds=0.4").stdout
    names = ("processor", "instruction sets", "native kernels", "measured with", "read")
    for name in (*names, "multiply float32", "multiply bfloat16", "multiply, as used"):
        assert f"\n{name} " in shown, shown
    for name in ("attention", "gated", "linear", "rms_norm", "rope", "sampling"):
        assert f"\n{name} " in shown, shown
    assert "kv_blocks" not in shown and "a token takes" not in shown
    found = json.loads(headway("doctor", "--machine", "--probe-seconds=0", "--json").stdout)
    assert found["num_threads"] == found["num_cores"]
    assert found["native_why"] and found["flops_per_s"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "nowhere is no folder, no report and no URL"),
        (("http://127.0.0.1:9",), "cannot be reached"),
        (("missing.json",), "missing.json"),
        (("a", "b"), "doctor takes one thing"),
        (("--machine", "http://127.0.0.1:9"), "--machine is this machine"),
        ((".", "--seconds=0"), "--seconds"),
    ],
)
def test_what_cannot_be_examined(arguments: tuple[str, ...], words: str) -> None:
    done = headway("doctor", *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_stats_have_a_window_of_any_length(light: LiveServer) -> None:
    status, data = light.get("/stats?seconds=20")
    windows = json.loads(data)["windows"]
    assert status == 200 and [each["seconds"] for each in windows] == [10, 60, 300, 20]
    for seconds in ("0", "301", "x", "-1", "1.5", "nan", "9" * 5000):
        status, data = light.get(f"/stats?seconds={seconds}")
        assert status == 400 and json.loads(data)["error"]["param"] == "seconds"
