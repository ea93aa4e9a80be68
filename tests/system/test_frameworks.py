"""The first examples of six frameworks work on the embedded model: one tool, one structured answer.

`make frameworks` installs each into a folder of its own below `build/frameworks`, in the versions
of `tests/system/frameworks`; one that is not there is skipped.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from headway.cli.common import model_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "frameworks"
INSTALLED = ROOT / "build" / "frameworks"
CITIES = ("Paris", "San Francisco")
PEOPLE = (("Anna", 30), ("Jason", 25))
IN_PYTHON = ("langchain", "llamaindex", "instructor", "pydantic_ai", "openai_agents")

pytestmark = [pytest.mark.hardening, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """The embedded model as `headway serve` serves it."""
    server = LiveServer(model_folder(None), "--kv-memory=64MiB")
    try:
        yield server.wait_ready()
    finally:
        server.close()


def run(command: list[str | Path], live: LiveServer) -> dict[str, Any]:
    """What a first example reports in its last line."""
    given = {
        "url": live.url,
        "weather": [f"What is the weather in {city}?" for city in CITIES],
        "people": [f"{name} is {age} years old." for name, age in PEOPLE],
    }
    done = subprocess.run(
        [*command, json.dumps(given)], cwd=SCRIPTS, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], times: int = 1) -> None:
    """Each tool was called `times` with what was asked, its result was said, the people are right.

    Where a framework calls no tool by itself, as instructor, nothing is said.
    """
    assert found["called"] == list(CITIES) * times
    if found["said"] is not None:
        assert len(found["said"]) == len(CITIES) * times
        assert all("sunny" in said and len(said) < 200 for said in found["said"]), found["said"]
    people = [{"name": name, "age": age} for name, age in PEOPLE]
    assert found["records"] == [people] * len(found["records"])


@pytest.mark.parametrize("name", IN_PYTHON)
def test_first_examples_in_python(name: str, live: LiveServer) -> None:
    python = INSTALLED / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed: make frameworks")
    check(run([python, SCRIPTS / f"{name}_first.py"], live), 2 if name == "openai_agents" else 1)


def test_first_examples_of_the_ai_sdk(live: LiveServer) -> None:
    node, folder = shutil.which("node"), INSTALLED / "ai_sdk"
    if node is None or not (folder / "node_modules").exists():
        pytest.skip("the AI SDK is not installed: make frameworks, with node and npm")
    shutil.copy(SCRIPTS / "ai_sdk" / "first.mjs", folder)
    check(run([node, folder / "first.mjs"], live))
