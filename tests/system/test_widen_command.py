"""`widen.py` on the command line: what it writes is served, chats, and says the same."""

import dataclasses
import json
from pathlib import Path

import pytest
from live_server import LiveServer, headway
from safetensors.torch import load_file, save_file
from tiny_model import write_json

from conftest import StartServer
from widen import main
from widening import SHAPES

QUESTION = {
    "messages": [{"role": "user", "content": "Tell me"}],
    "temperature": 0,
    "max_tokens": 16,
}


@pytest.fixture(scope="module")
def tied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its embedding as its head."""
    folder = tmp_path_factory.mktemp("tied") / "small"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A row of the table that is quick to write."""
    shape = dataclasses.replace(
        SHAPES["qwen2.5-0.5b"],
        hidden_size=160,
        num_layers=4,
        num_heads=10,
        head_dim=16,
        intermediate_size=200,
        vocab_size=1000,
    )
    monkeypatch.setitem(SHAPES, "toy", shape)
    return "toy"


def chat(live: LiveServer, model: str) -> str:
    status, answer = live.post("/v1/chat/completions", {"model": model, **QUESTION})
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_what_is_written_is_served_and_says_the_same(
    tied_model: Path,
    toy: str,
    tmp_path: Path,
    start_server: StartServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "wide"
    assert main([str(tied_model), "--like", toy, str(out)]) == 0
    told = capsys.readouterr().out
    assert "64 →     160" in told and f"headway serve {out}" in told
    assert "small" in (out / "README.md").read_text()
    small = chat(start_server(folder=tied_model).wait_ready(), "small")
    assert chat(start_server(folder=out).wait_ready(), "wide") == small
    done = headway("chat", out, "--temperature=0", "--max-tokens=16", stdin="Tell me\n")
    assert done.stdout == small + "\n", done.stderr


def test_a_dry_run_writes_nothing(
    tied_model: Path, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tied_model), str(tmp_path / "wide"), f"--like={toy}", "--dry-run"]
    assert main([*arguments]) == 0
    assert "copies of the stream" in capsys.readouterr().out
    assert not (tmp_path / "wide").exists()


def test_the_help_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SHAPES)


def test_errors_have_two_lines(
    tied_model: Path, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    out, taken, small = str(tmp_path / "out"), str(tmp_path / "taken"), str(tied_model)
    for arguments, code, word in (
        ([small], 2, "two folders"),
        ([small, out], 2, "--like is missing"),
        ([small, out, "--like=qwen9"], 2, "qwen2.5-0.5b"),
        ([small, out, f"--like={toy}", "--dtype=float16"], 2, "float16"),
        ([small, taken, f"--like={toy}"], 2, "not empty"),
        ([taken, out, f"--like={toy}"], 3, "no config.json"),
        ([small, out, "--like=llama-3.2-1b", "--dtype=bfloat16"], 0, ""),
    ):
        status = main([*arguments, *(["--dry-run"] if code == 0 else [])])
        told = capsys.readouterr().err.splitlines()
        told = [line for line in told if not line.startswith("Writing ")]
        assert status == code, told
        if code:
            assert len(told) == 2 and word in "".join(told)
    assert not (tmp_path / "out").exists()
