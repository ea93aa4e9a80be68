"""The script of the first ten minutes on a GPU: what fails is noted, and the rest goes on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import common  # noqa: E402
import gpu_bringup  # noqa: E402
import gpu_model  # noqa: E402

ROWS = [{"what": "copy", "value": 3000.0, "unit": "GB/s"}, {"what": "device", "value": "H100"}]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bringup, "has_gpu", lambda: False)


def report(out: Path) -> list[dict]:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))["stages"]


def played(monkeypatch: pytest.MonkeyPatch, plays: dict[str, object]) -> list[list[str]]:
    """Children that do what `plays` says by stage: rows, a status, or nothing in time."""
    commands = []

    def run(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        name = command[command.index("--child") + 1]
        play = plays.get(name, ROWS)
        if play == "hangs":
            raise subprocess.TimeoutExpired(command, float(str(given["timeout"])))
        if isinstance(play, int):
            return subprocess.CompletedProcess(command, play, "", "Traceback\nCUDA error: 700")
        out = Path(command[command.index("--out") + 1])
        (out / f"{name}.json").write_text(json.dumps(play), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gpu_bringup.subprocess, "run", run)
    return commands


def test_every_stage_has_a_limit_and_ten_minutes_hold_them():
    assert gpu_bringup.LIMITS_S.keys() == gpu_bringup.STAGES.keys()
    asked = [gpu_bringup.LIMITS_S[name] for name in gpu_bringup.BY_NAME]
    assert sum(gpu_bringup.LIMITS_S.values()) - sum(asked) <= 600
    quick = [gpu_bringup.LIMITS_S[name] for name in gpu_bringup.QUICK]
    assert sum(quick) <= 360


@pytest.mark.usefixtures("no_gpu")
def test_a_stage_that_crashes_or_hangs_is_noted_and_the_next_goes_on(tmp_path, monkeypatch, capsys):
    commands = played(monkeypatch, {"ceilings": 1, "model": "hangs"})
    gpu_bringup.main(["--out", str(tmp_path)])
    stages = {one["stage"]: one for one in report(tmp_path)}
    assert [*stages, *gpu_bringup.BY_NAME] == list(gpu_bringup.STAGES)
    assert "status 1" in stages["ceilings"]["failure"]
    assert "CUDA error: 700" in stages["ceilings"]["failure"]
    assert stages["model"]["failure"] == f"took more than {gpu_bringup.LIMITS_S['model']} s"
    assert stages["tiny"]["rows"] == ROWS and stages["tiny"]["failure"] == ""
    assert all("--quick" not in command for command in commands)
    told = capsys.readouterr().out
    assert "| copy | 3e+03 | GB/s |" in told and "| device | H100 |" in told
    assert "No GPU here" in told, "it does not say that these are no figures of a GPU"


@pytest.mark.usefixtures("no_gpu")
def test_stages_are_picked(tmp_path, monkeypatch):
    played(monkeypatch, {})
    gpu_bringup.main(["--out", str(tmp_path), "--stages", "tiny,versions"])
    assert [one["stage"] for one in report(tmp_path)] == ["tiny", "versions"]
    commands = played(monkeypatch, {})
    gpu_bringup.main(["--out", str(tmp_path), "--quick"])
    assert [one["stage"] for one in report(tmp_path)] == list(gpu_bringup.QUICK)
    assert all("--quick" in command for command in commands)


def test_a_stage_that_is_none_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_bringup.main(["--out", str(tmp_path), "--stages", "versions,speed"])
    assert "speed is none of versions" in capsys.readouterr().err


def test_what_was_installed_comes_from_the_folder(tmp_path, monkeypatch):
    """No network is asked for anything."""
    (tmp_path / "a-1.whl").touch()
    ran = []
    monkeypatch.setattr(gpu_bringup.subprocess, "run", lambda command, **_: ran.append(command))
    gpu_bringup.install(tmp_path)
    (command,) = ran
    assert "--no-index" in command and command[-1].endswith("a-1.whl")


@pytest.mark.parametrize(
    ("formats", "expected"), [("none", 15.0e9), ("fp8", 8.0e9), ("int8", 7.5e9), ("int4", 4.2e9)]
)
def test_bytes_that_a_step_reads(formats: str, expected: float):
    """Llama-3.1-8B: 15.0 GB in bf16 with its head, 4.2 GB in int4 with the head in int8; a token of
    KV has 131 kB."""
    assert gpu_model.kv_bytes("llama-3.1-8b") == 131_072
    assert gpu_model.weight_bytes("llama-3.1-8b", formats) == pytest.approx(expected, rel=0.02)


def test_shapes_are_what_the_engine_reads():
    """Each shape is a folder that a ModelSpec is read from, with a tokenizer for the server."""
    from headway.spec import read_model_spec

    for name, shape in gpu_model.SHAPES.items():
        with gpu_model.shape_folder(name) as folder:
            spec = read_model_spec(folder)
            assert (folder / "tokenizer.json").exists()
        assert (spec.hidden_size, spec.num_layers) == (
            shape["hidden_size"],
            shape["num_hidden_layers"],
        )


def test_a_step_of_plain_torch_is_the_peer():
    """The loop that a graph holds on a GPU runs: a step of a tiny shape takes some time."""
    assert gpu_model.torch_loop("tiny") > 0


def test_the_rate_doubles_until_fewer_than_nine_of_ten_are_in_time(monkeypatch):
    def at_rate(url: str, rate: int) -> dict[str, float]:
        share = 1.0 if rate < 16 else 0.92 if rate == 16 else 0.4
        return {"attainment": share, "goodput_per_s": rate * share}

    @contextmanager
    def serving(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 32
        yield "http://127.0.0.1:9", 0

    monkeypatch.setattr(gpu_model, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_model, "at_rate", at_rate)
    monkeypatch.setattr(common, "serving", serving)
    rows = gpu_model.served(False)
    assert [row["what"].partition(":")[0] for row in rows[::2]] == [
        *("4/s", "8/s", "16/s", "32/s"),
        "goodput at 90%, at least",
    ]
    assert rows[-1]["value"] == pytest.approx(16 * 0.92)


def test_a_sanitizer_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(gpu_model.shutil, "which", lambda name: None)
    assert gpu_model.sanitized() == [{"what": "compute-sanitizer", "value": "not installed"}]
