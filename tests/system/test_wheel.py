"""The wheel: built from this checkout and installed into an empty environment, it answers."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.hardening


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its output is in the message when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clean export, so that nothing that git does not know gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    run("git", "clone", "--quiet", ROOT, folder / "source", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source", cwd=folder)
    [built] = folder.glob("headway-*.whl")
    return built


def test_the_wheel_holds_kernels_and_models_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("headway/runtime/native/_native") for name in names)
    assert any(name.startswith("headway/perf/_learning.") for name in names)
    for model in ("headway-tiny", "headway-draft"):
        assert f"headway/embedded/{model}/model.safetensors" in names
    assert "headway/embedded/headway-tiny/medusa.safetensors" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headway"}


def test_an_installed_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python, headway = (tmp_path / "env" / "bin" / name for name in ("python", "headway"))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "requirements.lock", wheel, cwd=tmp_path)
    assert "2 + 3 = 5." in run(headway, "run", "--chat", "What is 2 + 3?", cwd=tmp_path)
    assert "native" in run(headway, "serve", "--dry-run", cwd=tmp_path)
