"""Fewer tokens are served where a gate was passed with them, and refused otherwise."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.cli import kv_gate
from headway.config.options import EngineOptions
from headway.core.errors import UsageError
from headway.evals.pairs import EvalComparison, Measure
from headway.spec.embedded import model_folder

FOLDER = model_folder(None)
READS = EngineOptions(kv_read="25%")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def report(verdict: str = "as good", against: Path = FOLDER) -> Any:
    measure = Measure(
        **{"name": "skills", "kind": "points", "items": 9, "first": 1.0, "second": 1.0},
        **{"loss": 0.0, "low": 0.0, "high": 0.0, "tolerance": 0.02, "floor": 0.0},
        **{"ceiling": 0.0, "verdict": verdict, "required": True},
    )
    return SimpleNamespace(
        comparison=EvalComparison(first="whole", second="less", measures=[measure], differences=[]),
        against=SimpleNamespace(place=str(against)),
    )


def test_what_reads_everything_needs_no_gate():
    assert kv_gate.record_file(FOLDER, EngineOptions()) is None
    kv_gate.check(FOLDER, EngineOptions(kv_cache_dtype="int8"))


def test_a_passed_gate_lets_the_same_way_start_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(UsageError, match="no gate was passed") as refused:
        kv_gate.check(FOLDER, READS)
    assert "--kv-read 25%" in str(refused.value) and "--allow-unverified-kv" in refused.value.fix
    kv_gate.record(FOLDER, READS, report(), [0, 300, 800])
    assert "headway serve may start with these options" in capsys.readouterr().out
    kv_gate.check(FOLDER, READS)
    kv_gate.check(FOLDER, EngineOptions(kv_read="0.25"))
    whole = tmp_path / "kv.yaml"
    whole.write_text("layers: {0: whole}")
    for other in (
        EngineOptions(kv_read="20%"),
        EngineOptions(kv_read="25%", quantization="int4"),
        EngineOptions(kv_read="25%", kv_layers=str(whole)),
    ):
        with pytest.raises(UsageError, match="no gate was passed"):
            kv_gate.check(FOLDER, other)


def test_blocks_of_another_size_and_skipped_layers_have_gates_of_their_own():
    """Passed in blocks of 16 and with two layers in the model's type, asked without."""
    skips = EngineOptions(
        kv_read="25%", kv_cache_dtype="int8", kv_cache_dtype_skip_layers="0,1", block_size=16
    )
    kv_gate.record(FOLDER, skips, report(), [0, 300, 800])
    kv_gate.check(FOLDER, skips)
    for other in ({"kv_cache_dtype_skip_layers": ""}, {"block_size": 64}):
        with pytest.raises(UsageError, match="no gate was passed"):
            kv_gate.check(FOLDER, replace(skips, **other))


def test_a_file_that_only_calls_layers_whole_leaves_nothing_out(tmp_path: Path):
    whole = tmp_path / "kv.yaml"
    whole.write_text("layers: {0-1: whole}")
    assert kv_gate.record_file(FOLDER, EngineOptions(kv_layers=str(whole))) is None
    windows = tmp_path / "windows.yaml"
    windows.write_text("layers: {0: {window: 64}, 1: whole}")
    assert kv_gate.record_file(FOLDER, EngineOptions(kv_layers=str(windows))) is not None


def test_a_share_of_prompts_has_a_gate_of_its_own(tmp_path: Path):
    """By share, by the layers that choose, and beside one that reads as much."""
    keeps = EngineOptions(kv_keep="25%")
    with pytest.raises(UsageError, match="--kv-keep 25% is lossy"):
        kv_gate.check(FOLDER, keeps)
    kv_gate.record(FOLDER, keeps, report(), [0, 300, 800])
    kv_gate.check(FOLDER, EngineOptions(kv_keep="0.25"))
    whole = tmp_path / "kv.yaml"
    whole.write_text("layers: {0: whole}")
    for other in (
        EngineOptions(kv_keep="50%"),
        EngineOptions(kv_keep="25%", kv_layers=str(whole)),
        READS,
    ):
        with pytest.raises(UsageError, match="no gate was passed"):
            kv_gate.check(FOLDER, other)


def test_the_same_windows_have_one_record_whatever_their_file_is_called(tmp_path: Path):
    files = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for path in files:
        path.write_text(f"# {path.name}\nlayers: {{2-3: {{window: 64, sinks: 4}}}}")
    first, second = (EngineOptions(kv_layers=str(path)) for path in files)
    kv_gate.record(FOLDER, first, report(), [0, 300, 800])
    kv_gate.check(FOLDER, second)


@pytest.mark.parametrize(("verdict", "distances"), [("worse", [0, 300, 800]), ("unclear", [0])])
def test_a_failed_or_a_short_gate_is_not_recorded(verdict: str, distances: list[int]):
    kv_gate.record(FOLDER, READS, report(verdict), distances)
    with pytest.raises(UsageError):
        kv_gate.check(FOLDER, READS)


def test_a_gate_against_another_model_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A weaker model is easy to equal. The same weights elsewhere are the same model."""
    weaker, nowhere = FOLDER.parent / "headway-draft", Path("http://127.0.0.1:9/v1")
    for other in (weaker, nowhere):
        kv_gate.record(FOLDER, READS, report(against=other), [0, 300, 800])
        assert "whole is no folder with the same weights" in capsys.readouterr().out
        with pytest.raises(UsageError):
            kv_gate.check(FOLDER, READS)
    copied = tmp_path / "copy"
    shutil.copytree(FOLDER, copied)
    kv_gate.record(FOLDER, READS, report(against=copied), [0, 300, 800])
    kv_gate.check(FOLDER, READS)


def test_the_record_says_what_was_measured():
    kv_gate.record(FOLDER, READS, report(), [0, 300, 800])
    path = kv_gate.record_file(FOLDER, READS)
    assert path is not None
    content = msgspec.json.decode(path.read_bytes())
    assert content["against"] == "whole" and content["measures"][0]["name"] == "skills"
