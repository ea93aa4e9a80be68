"""Prune, distill, evaluate, serve: one chain on the command line, at the size of a test."""

import json
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.cli.main import main
from headway.spec import read_model_spec

SMALL = ("--step-tokens=128", "--row-length=32", "--learning-rate=0.003")
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "sea.txt"
    path.write_text("tell me about the sea, the mountains and the stars\n\n" * 60)
    return str(path)


@pytest.fixture
def tested(tmp_path: Path) -> Path:
    """A folder as --eval-data wants it, with hardly anything in it."""
    words = "Once upon a time there was a little girl who liked to play with her friends. "
    for name in ("text/val.txt", "eval/wikitext-2/test.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(words * 30)
    lambada = tmp_path / "eval" / "lambada" / "lambada_test.jsonl"
    lambada.parent.mkdir()
    lambada.write_text((json.dumps({"text": words.strip(". ")}) + "\n") * 3)
    return tmp_path


def test_a_pruned_model_is_taught_rounded_judged_and_served(
    tiny_model: Path, text: str, tested: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    less, out = tmp_path / "less", tmp_path / "out"
    calibrate = (f"--calibrate={text}", "--rows=4", "--row-length=32")
    asked = ["prune", str(tiny_model), str(less), "--neurons=0.5", "--kv-heads=1", *calibrate]
    assert main([*asked, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "neurons of an MLP" in told and "decodes at most" in told and not less.exists()
    assert main(asked) == 0
    spec = read_model_spec(less)
    assert (spec.intermediate_size, spec.num_kv_heads, spec.num_heads) == (64, 1, 2)
    assert "neurons" in (less / "README.md").read_text()
    taught = ["distill", str(tiny_model), str(less), str(out), f"--data={text}", "--steps=10"]
    judged = [f"--against={tiny_model}", f"--eval-data={tested}", "--questions=1", "--windows=2"]
    assert main([*taught, *SMALL, "--quantize=int4", "--quantize-group=32", *judged]) == 0
    card = (out / "README.md").read_text()
    assert "int4 in groups of 32" in card and "KL, books" in card
    llm = LLM(out, kv_memory="16MiB")
    assert str(llm.settings.quantization).startswith("int4")
    answer = llm.generate("Tell me about", ASKED, use_tqdm=False)[0].outputs[0]
    assert len(answer.token_ids) == 6


def test_what_fails_the_gate_is_not_written(
    tiny_model: Path, text: str, tested: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearly all weights gone: another distribution, told by its divergence; status 5."""
    out = tmp_path / "spoiled"
    options = [f"--calibrate={text}", "--rows=2", "--row-length=32", "--sparsity=0.99"]
    judged = [f"--against={tiny_model}", f"--eval-data={tested}", "--questions=1", "--windows=8"]
    asked = ["prune", str(tiny_model), str(out), "--method=magnitude", *options, *judged, "--gate"]
    assert main(asked) == 5
    assert "is not written" in capsys.readouterr().out
    assert not [path for path in tmp_path.iterdir() if "spoiled" in path.name]


def test_errors_have_two_lines(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny_model), str(tmp_path / "out")
    for arguments, code, word in (
        ([model], 2, "two folders"),
        ([model, out], 2, "Nothing is to be removed"),
        ([model, out, "--layers=2"], 2, "--layers 2"),
        ([model, out, "--pattern=2:4", "--sparsity=0.3"], 2, "2:4 is half"),
        ([model, out, "--neurons=0.5", "--calibrate=nowhere.txt"], 2, "nowhere.txt"),
        ([str(tmp_path), out, "--neurons=0.5"], 3, "config.json"),
        ([str(tmp_path / "nowhere"), out, "--neurons=0.5"], 3, "nowhere"),
    ):
        assert main(["prune", *arguments]) == code
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 2 and word in "".join(told), told
    assert not (tmp_path / "out").exists()
