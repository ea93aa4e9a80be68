"""Batches over real processes: killed at any moment, each line is answered once all the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import PATIENCE_S, LiveServer, clean_environment, headway, wait_until

from conftest import StartServer

LINES, NUM_LONG, MANY_LINES = 300, 32, 5000
TMPFS_BYTES = 1_500_000


def lines_of(
    count: int, model: str, max_tokens: int = 24, num_long: int = 0
) -> list[dict[str, Any]]:
    """With long ones at the end a batch of which a part is done is far from over."""
    bodies = (
        {
            "model": model,
            "prompt": f"Once upon a time {i} ",
            "max_tokens": max_tokens if i < count - num_long else 400,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(count)
    )
    return [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@contextmanager
def client_of(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def begin(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def num_done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed + counts.failed if counts else 0


def until_done(
    client: openai.OpenAI, batch_id: str, count: int, timeout_s: float = PATIENCE_S
) -> int:
    """Wait until at least `count` lines are done."""
    return wait_until(lambda: (n := num_done(client, batch_id)) >= count and n, timeout_s=timeout_s)


def completed(
    client: openai.OpenAI, batch_id: str, timeout_s: float = PATIENCE_S
) -> dict[str, Any]:
    """custom_id → line of the batch's output, once it is complete; every id once, none failed."""

    def over() -> openai.types.Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status == "completed" else None

    batch = wait_until(over, timeout_s=timeout_s)
    assert batch.error_file_id is None, client.files.content(batch.error_file_id).text[:2000]
    lines = [json.loads(text) for text in client.files.content(batch.output_file_id).iter_lines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def text_of(line: dict[str, Any]) -> str:
    assert line["response"]["status_code"] == 200, line
    text: str = line["response"]["body"]["choices"][0]["text"]
    return text


def test_a_batch_survives_two_kills(start_server: StartServer, tmp_path: Path) -> None:
    flag = f"--data-dir={tmp_path / 'data'}"
    batch_id, done = "", 0
    for share in (1 / 3, 2 / 3):
        live = start_server(flag).wait_ready()
        lines = lines_of(LINES, live.model, num_long=NUM_LONG)
        with client_of(live) as client:
            batch_id = batch_id or begin(client, lines)
            assert num_done(client, batch_id) >= done
            done = until_done(client, batch_id, int(LINES * share))
            assert done < LINES, "it was over before it could be killed"
        live.signal(signal.SIGKILL)
        live.wait_end()
    live = start_server(flag).wait_ready()
    with client_of(live) as client:
        found = completed(client, batch_id)
        assert found.keys() == {line["custom_id"] for line in lines}
        for line in lines[:: LINES // 10]:
            status, alone = live.post("/v1/completions", line["body"])
            assert status == 200
            assert text_of(found[line["custom_id"]]) == alone["choices"][0]["text"]
        assert client.batches.retrieve(batch_id).request_counts.completed == LINES


def test_the_engine_dies_under_a_batch(start_server: StartServer) -> None:
    live = start_server().wait_ready()
    lines = lines_of(LINES, live.model, num_long=NUM_LONG)
    with client_of(live) as client:
        batch_id = begin(client, lines)
        until_done(client, batch_id, LINES // 3)
        os.kill(live.engine_pid(), signal.SIGKILL)
        assert len(completed(client, batch_id)) == LINES
    assert live.metric("engine_restarts_total") == 1


def test_a_server_ends_in_the_middle_of_a_batch(start_server: StartServer, tmp_path: Path) -> None:
    """SIGTERM waits for nobody's batch: what ran is run by the next server."""
    flag = f"--data-dir={tmp_path / 'data'}"
    live = start_server(flag, "--drain-timeout=60").wait_ready()
    lines = lines_of(40, live.model, max_tokens=400)
    with client_of(live) as client:
        batch_id = begin(client, lines)
        wait_until(lambda: live.metric("num_requests_running") > 0)
    live.signal(signal.SIGTERM)
    assert live.wait_end(timeout_s=60) == 0
    live = start_server(flag).wait_ready()
    with client_of(live) as client:
        assert len(completed(client, batch_id)) == 40


def can_mount() -> bool:
    """Whether this machine lets a test have a small disk of its own."""
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="no user namespaces to mount a small disk in")
def test_a_full_disk_refuses_uploads_and_nothing_else(
    start_server: StartServer, tmp_path: Path
) -> None:
    mount = f'mount -t tmpfs -o size={TMPFS_BYTES} none {tmp_path} && exec "$@"'
    live = start_server(
        f"--data-dir={tmp_path}/data", before=("unshare", "-rm", "sh", "-c", mount, "sh")
    ).wait_ready()
    with client_of(live) as client:
        kept, refused = [], None
        for _ in range(30):
            try:
                kept.append(client.files.create(file=b"x" * 200_000, purpose="user_data").id)
            except openai.APIStatusError as error:
                refused = error
                break
        assert refused is not None and 2 < len(kept) < 10
        assert refused.status_code == 507 and refused.code == "storage_full"
        assert "disk" in refused.message and str(tmp_path) not in refused.message
        assert live.is_ready() and len(live.probe()) == 12
        assert len(client.files.list().data) == len(kept), "reading goes on"
        for name in kept:
            client.files.delete(name)
        assert len(completed(client, begin(client, lines_of(20, live.model)))) == 20


def test_an_offline_batch_survives_two_kills(tiny_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(lines_of(LINES, "tiny", 48, NUM_LONG)))
    arguments = ("batch", str(tiny_model), str(source), f"--output={target}", "--kv-memory=64MiB")
    for share in (1 / 4, 1 / 2):
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(),
        )
        try:
            wait_until(lambda share=share: num_lines(target) >= LINES * share)
        finally:
            process.kill()
            process.wait()
        assert num_lines(target) < LINES, "it was over before it could be killed"
    done = headway(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"of {LINES} lines are done" in done.stderr and f"{LINES} results" in done.stdout
    found = [json.loads(text) for text in target.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in found) == sorted(f"line-{i}" for i in range(LINES))
    assert all(text_of(line) for line in found)
    assert headway(*arguments).returncode == 0


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.hardening
def test_five_thousand_lines_are_killed_twice(
    stories: Path, start_server: StartServer, tmp_path: Path
) -> None:
    flag = f"--data-dir={tmp_path / 'data'}"
    batch_id, begun_s = "", time.monotonic()
    for share in (1 / 3, 2 / 3):
        live = start_server(flag, folder=stories).wait_ready()
        lines = lines_of(MANY_LINES, live.model, max_tokens=32)
        with client_of(live) as client:
            batch_id = batch_id or begin(client, lines)
            until_done(client, batch_id, int(MANY_LINES * share), timeout_s=900)
        live.signal(signal.SIGKILL)
        live.wait_end()
    live = start_server(flag, folder=stories).wait_ready()
    with client_of(live) as client:
        found = completed(client, batch_id, timeout_s=900)
    assert found.keys() == {line["custom_id"] for line in lines}
    print(f"{MANY_LINES} lines, killed twice, in {time.monotonic() - begun_s:.0f} s")
