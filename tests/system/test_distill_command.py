"""`headway distill` on the command line: what it writes is served, a killed run goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_model import write_json

from headway import LLM, SamplingParams
from headway.cli.main import main
from headway.evals.skills.suite import TEST_SEED, examples

SMALL = ("--step-tokens=128", "--row-length=32")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "sea.txt"
    path.write_text("tell me about the sea, the mountains and the stars\n\n" * 40)
    return f"--data={path}"


def test_a_student_is_written_with_its_record(
    tiny_model: Path, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student"
    arguments = [str(tiny_model), str(tiny_model), str(out), texts, "--steps=4", *SMALL, "--fresh"]
    assert main(["distill", *arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "sea.txt" in told and "memory         about 405 MiB" in told and not out.exists()
    assert main(["distill", *arguments]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"README.md", "loss.csv", "loss.svg", "training.json", "tokenizer.json"} <= names
    assert not (tmp_path / "student.training").exists()
    record = json.loads((out / "training.json").read_text())
    assert record["asked"]["steps"] == 4 and record["asked"]["fresh"] is True
    answer = LLM(out).generate("Once upon", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 4


@pytest.mark.hardening
def test_a_killed_command_goes_on_to_the_same_weights(
    tiny_model: Path, texts: str, tmp_path: Path
) -> None:
    """SIGKILL behind the first checkpoint; the second command ends as one without it does."""
    options = [texts, "--steps=40", *SMALL, "--save-every=2"]
    verb = [sys.executable, "-m", "headway.cli.main", "distill"]
    folders = [str(tiny_model), str(tiny_model), str(tmp_path / "cut")]
    process = subprocess.Popen([*verb, *folders, *options])
    saved = tmp_path / "cut.training" / "checkpoint.safetensors"
    while not saved.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for name in ("cut", "whole"):
        arguments = [str(tiny_model), str(tiny_model), str(tmp_path / name), *options]
        assert main(["distill", *arguments]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert one.keys() == other.keys()
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_errors_have_two_lines(
    tiny_model: Path, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = next(examples("arithmetic", 1, TEST_SEED))
    asked = tmp_path / "asked.jsonl"
    turns = [*tested.messages, {"role": "assistant", "content": "5"}]
    asked.write_text(json.dumps({"messages": turns}))
    book = tmp_path / "data" / "text" / "val.txt"
    book.parent.mkdir(parents=True)
    book.write_text("they found a red ball under the old tree and went home with it at night\n")
    copied = tmp_path / "copied.txt"
    copied.write_text(f"Once upon a time,\n{book.read_text()}and so on\n" * 40)  # one paragraph
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    write_json(other / "tokenizer.json", tokenizer)
    model, out = str(tiny_model), str(tmp_path / "out")
    for arguments, code, word in (
        ([model, out], 2, "three folders"),
        ([model, model, out], 2, "--data is missing"),
        ([model, model, out, "--data=nowhere.txt"], 2, "nowhere.txt cannot be read"),
        ([model, model, out, f"--data={asked}"], 2, "line 1, is a question of an evaluation"),
        ([model, model, out, f"--data={book}"], 2, "is what an evaluation tests"),
        ([model, model, out, f"--data={copied}", f"--eval-data={book.parents[1]}"], 2, "no text"),
        ([model, model, out, texts, "--gate"], 2, "--against"),
        ([model, str(other), out, texts], 3, "tokenizers"),
        ([model, model, str(other), texts], 2, "not empty"),
        ([model, str(book.parent), out, texts], 3, "config.json"),
        ([str(tmp_path / "nowhere"), model, out, texts], 3, "nowhere"),
    ):
        assert main(["distill", *arguments]) == code
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 2 and word in "".join(told), told
    assert not (tmp_path / "out").exists()
