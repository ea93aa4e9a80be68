"""A server that reads fewer tokens: it starts with a passed gate alone, and tells what it does."""

import json
from pathlib import Path

import pytest
from live_server import LiveServer

from headway.config.options import EngineOptions
from headway.spec.embedded import model_folder

PROMPT = [10 + number * 7 % 300 for number in range(600)]
HALF_WHOLE = "layers: {0-1: whole, 2: {window: 256, sinks: 4}}"


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "layers.yaml"
    path.write_text(HALF_WHOLE)
    return str(path)


def test_it_does_not_start_without_a_gate(layers: str):
    server = LiveServer(None, "--kv-read=25%", f"--kv-layers={layers}")
    try:
        assert server.wait_end() == 2
        assert "no gate was passed with it here" in server.stderr
    finally:
        server.close()


def test_it_serves_and_tells_what_is_read(layers: str):
    """Three KV groups in one server: /stats counts them, and an exact request reads all."""
    server = LiveServer(
        None, "--kv-read=25%", f"--kv-layers={layers}", "--allow-unverified-kv", "--kv-memory=64MiB"
    ).wait_ready()
    try:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        status, answer = server.post("/v1/completions", {**body, "kv": "exact"})
        assert status == 400 and "windows, read" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        details = answer["usage"]["prompt_tokens_details"]
        assert 0 < details["read_tokens"] < details["kept_tokens"] < len(PROMPT)
        status, all_read = server.post("/v1/completions", {**body, "kv": {"read": 1}})
        assert status == 200
        assert "read_tokens" not in all_read["usage"]["prompt_tokens_details"]
        status, stats = server.get("/stats")
        assert status == 200 and len(json.loads(stats)["now"]["kv_groups"]) == 3
    finally:
        server.close()


def test_it_serves_from_a_part_of_the_prompt(layers: str):
    """A quarter in three layers of six: told, again the same, more by request, siblings alike."""
    server = LiveServer(
        None, "--kv-keep=25%", f"--kv-layers={layers}", "--allow-unverified-kv", "--kv-memory=64MiB"
    ).wait_ready()
    try:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        texts = []
        for kv in (None, None, {"keep": 0.6}, {"keep": 1}):
            status, answer = server.post("/v1/completions", {**body, "kv": kv} if kv else body)
            assert status == 200
            kept = answer["usage"]["prompt_tokens_details"]["kept_tokens"]
            texts.append((kept, answer["choices"][0]["text"]))
        assert texts[0] == texts[1]
        assert texts[0][0] < texts[2][0] < texts[3][0] < len(PROMPT)
        status, answer = server.post("/v1/completions", {**body, "kv": {"keep": 0.1}})
        assert status == 400 and "keep 0.25 of their tokens" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", {**body, "n": 3, "stream": False})
        assert status == 200 and {c["text"] for c in answer["choices"]} == {texts[0][1]}
    finally:
        server.close()


def test_the_gate_of_eval_is_the_one_that_serve_asks_for(
    layers: str, capsys: pytest.CaptureFixture[str]
):
    """The same model, options and file, by the command that the refusal names."""
    from headway.cli import kv_gate
    from headway.cli.main import main

    folder = model_folder(None)
    arguments = [
        *("eval", str(folder), "--kv-read=50%", f"--kv-layers={layers}", "--gate"),
        *(f"--against={folder}", "--questions=1", "--skills=copy", "--levels=1"),
        *("--distances=0,300,800", "--tolerance=1"),
    ]
    assert main(arguments) == 0
    assert "headway serve may start with these options" in capsys.readouterr().out
    kv_gate.check(folder, EngineOptions(kv_read="50%", kv_layers=layers))
