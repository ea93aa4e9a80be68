"""`make dist`: what it builds can be published, and in an empty environment it answers."""

import email
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from live_server import LiveServer, clean_environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.hardening


def environment() -> dict[str, str]:
    """The environment without a path to this checkout, so that the wheel's package is imported."""
    return {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its output is in the message when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clean export, so that nothing that git does not know gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    run("git", "clone", "--quiet", ROOT, folder / "source", cwd=folder)
    run("make", "dist", f"PYTHON={sys.executable}", cwd=folder / "source")
    [built] = (folder / "source" / "dist").glob("headway-*.whl")
    return built


def test_an_index_would_take_both_files(wheel: Path) -> None:
    """One wheel for Python 3.11 and later, for glibc from a stated version on; and the sources."""
    assert re.search(r"-cp311-abi3-manylinux_2_\d+_x86_64\.", wheel.name), wheel.name
    [sources] = wheel.parent.glob("headway-*.tar.gz")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"native/isa.cpp", "native/build_hook.py", "pyproject.toml", "LICENSE"} <= names
    assert not any(name.endswith(".so") for name in names)


def test_the_wheel_holds_kernels_and_models_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("headway/runtime/native/_native") for name in names)
    assert any(name.startswith("headway/perf/_learning.") for name in names)
    for model in ("headway-tiny", "headway-draft"):
        assert f"headway/embedded/{model}/model.safetensors" in names
    assert "headway/embedded/headway-tiny/medusa.safetensors" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headway"}


def test_the_wheel_is_typed_and_says_what_it_needs(wheel: Path) -> None:
    """Type checkers find `py.typed`; each dependency has a lower bound."""
    archive = zipfile.ZipFile(wheel)
    assert "headway/py.typed" in archive.namelist()
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    needed = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    assert len(needed) > 10
    assert [text for text in needed if "extra ==" not in text and ">=" not in text] == []


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an empty environment with the wheel and the lock's versions."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    pip = (programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "requirements.lock", wheel, cwd=folder)
    return programs


def test_an_installed_wheel_answers(installed: Path, tmp_path: Path) -> None:
    headway = installed / "headway"
    assert "2 + 3 = 5." in run(headway, "run", "--chat", "What is 2 + 3?", cwd=tmp_path)
    assert "native" in run(headway, "serve", "--dry-run", cwd=tmp_path)
    module = (installed / "python", "-m", "headway", "--version")
    assert run(*module, cwd=tmp_path) == run(headway, "--version", cwd=tmp_path)


def test_an_installed_wheel_serves(
    installed: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small model that does not come along answers over HTTP on loopback."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    live = LiveServer(shared / "models" / "stories260K", python=str(installed / "python"))
    try:
        live.wait_ready()
        body = {"model": live.model, "prompt": "Once upon a time", "max_tokens": 8}
        status, answer = live.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] > 0
    finally:
        live.close()
