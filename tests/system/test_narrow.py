"""`headway narrow`: windows found, judged beside the whole model, written, and served."""

from pathlib import Path

import pytest

from headway.cli.main import main
from headway.core.kv_layers import narrowed
from headway.core.model_spec import read_model_spec
from headway.evals.narrowing import Found, Layers, Losses, Lost

SMALL = ("--candidates=8", "--items=2", "--rows=4", "--row-length=32", "--context=32")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "sea.txt"
    path.write_text("tell me about the sea, the mountains and the stars\n\n" * 60)
    return str(path)


def test_a_file_is_found_judged_and_written(
    tiny_model: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Two layers and one candidate, 8 tokens and 4 sinks of 32: both, for less than half.

    Random weights say something else without the rest: the gate refuses it, unless 2 nats may go.
    """
    out = tmp_path / "kv.yaml"
    asked = ["narrow", str(tiny_model), str(out), *SMALL, "--share=0.4", "--kv-memory=16MiB"]
    asked += [f"--calibrate={text}", "--questions=1", "--gate", "--distances=0"]
    assert main([*asked, "--dry-run"]) == 0 and not out.exists()
    assert main([*asked, "--max-loss=1"]) == 5 and not out.exists()
    assert "gate: fails: KL, general" in capsys.readouterr().out
    assert main([*asked, "--max-loss=1", "--kl-tolerance=2"]) == 0
    told = capsys.readouterr().out
    assert "a share of 0.375" in told and "gate: passes" in told
    spec = narrowed(read_model_spec(tiny_model), str(out))
    assert sorted(layer.window for layer in spec.layers) == [8, 8]
    comments = [line for line in out.read_text().splitlines() if line.startswith("#")]
    assert any("skill lookup at 0" in line and "loss" in line for line in comments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv.yaml", "sea.txt"]
    assert main(asked) == 2 and "is there already" in capsys.readouterr().err


def test_too_large_a_loss_writes_nothing(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    """Status 5, with the kind that loses most and what would help."""
    layers = Layers(seen=(32, 32), sinks=4, candidates=(8,), judged=32)
    lost = Losses(kinds={"copy": Lost(0.0, 0, 9), "sort": Lost(0.03, 1, 9)})
    found = Found(windows=(8, 8), lost=lost, alone=[{0: 0.0, 8: 0.1}] * 2)
    monkeypatch.setattr("headway.cli.narrow.searched", lambda *_: (layers, found))
    assert main(["narrow", str(tiny_model), str(tmp_path / "kv.yaml"), *SMALL]) == 5
    assert "sort loses 0.0300 nats a token, above --max-loss 0.02" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["FOLDER"], "the file to write"),
        (["FOLDER", "OUT", "--kv-layers=x.yaml"], "Leave --kv-layers out"),
        (["FOLDER", "OUT", "--kv-cache-dtype=int4"], "Give --sinks 0"),
        (["FOLDER", "OUT", "--context=1m"], "--context 1000000"),
        (["FOLDER", "nowhere/OUT"], "no folder"),
    ],
)
def test_what_cannot_be_done_is_told(
    arguments: list[str], word: str, tiny_model: Path, tmp_path: Path, capsys
):
    names = {"FOLDER": str(tiny_model), "OUT": str(tmp_path / "kv.yaml")}
    names["nowhere/OUT"] = str(tmp_path / "nowhere" / "kv.yaml")
    assert main(["narrow", *(names.get(each, each) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert word in error and len(error.strip().splitlines()) == 2
