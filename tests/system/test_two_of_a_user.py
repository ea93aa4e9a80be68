"""Two servers, or two gateways, of one user on one machine: each works, or is refused by name."""

import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from live_gateway import LiveGateway
from live_server import NO_TORCH, LiveAddress, LiveServer, clean_environment, wait_until

from batch_calls import jsonl, line
from conftest import StartServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def home_of(folder: Path) -> dict[str, str]:
    """The variables of a user whose home this is, who names no data folder."""
    names = ("STATE", "CACHE", "CONFIG", "DATA")
    xdg = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in names}
    return {"HOME": str(folder), "HEADWAY_DATA_DIR": "", **xdg}


def run_batch(live: LiveAddress, name: str) -> str:
    """The id of a batch of one line that has been completed."""
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        body = jsonl([line(name, model=live.model, prompt=[5])])
        file = client.files.create(file=("in.jsonl", body), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        return batch.id


def batches_of(live: LiveAddress) -> list[str]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        return [batch.id for batch in client.batches.list()]


def complaints(live: LiveAddress) -> list[str]:
    """Lines of the log above INFO."""
    return [text for text in live.stderr.splitlines() if " WARNING " in text or " ERROR " in text]


def test_a_second_server_of_a_user_keeps_its_own_files(
    start_server: StartServer, tmp_path: Path
) -> None:
    home, ports = home_of(tmp_path), (free_port(), free_port())

    def start(port: int) -> LiveServer:
        return start_server(NO_TORCH, f"--port={port}", env=home).wait_ready()

    first = start(ports[0])
    kept = run_batch(first, "a")
    second = start(ports[1])
    assert batches_of(second) == []
    other = run_batch(second, "b")
    assert batches_of(first) == [kept] and batches_of(second) == [other]
    assert complaints(first) == complaints(second) == []
    told = [text for text in second.stderr.splitlines() if "keeps files and batches" in text]
    assert len(told) == 1 and f"port-{ports[1]}" in told[0]
    for live in (first, second):
        live.close()
    again = start(ports[1])  # alone now, and still with what it kept
    assert batches_of(again) == [other]
    assert complaints(again) == []


def test_a_server_that_shares_a_folder_by_name_is_told_once_what_is_off(
    start_server: StartServer, tmp_path: Path
) -> None:
    shared = {"HEADWAY_DATA_DIR": str(tmp_path / "d")}
    run_batch(start_server(NO_TORCH, env=shared).wait_ready(), "a")
    second = start_server(NO_TORCH, env=shared).wait_ready()
    (line,) = complaints(second)
    assert " WARNING " in line and "files and batches are not served here" in line
    with openai.OpenAI(base_url=second.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.batches.list()
        assert caught.value.code == "storage_in_use"
        client.completions.create(model=second.model, prompt=[5], max_tokens=2)
    assert complaints(second) == [line]


def test_a_second_gateway_on_one_ledger_is_refused_and_no_row_is_lost(
    start_server: StartServer, tmp_path: Path
) -> None:
    upstream = start_server(NO_TORCH).wait_ready()
    gateway = LiveGateway(upstream.url)
    try:
        data = gateway.temp / "data"
        for _ in range(3):
            assert gateway.post("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        arguments = ("gateway", "--port=0", f"--upstream={upstream.url}/v1")
        second = subprocess.run(
            [sys.executable, "-m", "headway.cli.main", *arguments],
            env=clean_environment() | {"HEADWAY_DATA_DIR": str(data)},
            capture_output=True,
            timeout=120,
        )
        said = second.stderr.decode()
        assert second.returncode != 0 and "is ready" not in second.stdout.decode()
        assert f"Another gateway keeps its ledger in {data / 'gateway'}." in said
        assert "--data-dir" in said and "Traceback" not in said
        assert gateway.post("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        wait_until(lambda: len(gateway.rows("SELECT id FROM requests WHERE status = 'ok'")) == 4)
    finally:
        gateway.close()


def test_a_gateway_beside_a_server_of_its_user(start_server: StartServer, tmp_path: Path) -> None:
    """Both keep files and batches; the one that starts second has a folder of its port."""
    home, port = home_of(tmp_path), free_port()
    server = start_server(NO_TORCH, f"--port={free_port()}", env=home).wait_ready()
    run_batch(server, "a")
    gateway = LiveGateway(server.url, env=home, flags=(f"--port={port}",))
    try:
        assert run_batch(gateway, "b")
        assert complaints(gateway) == []
    finally:
        gateway.close()
