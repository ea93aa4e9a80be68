"""The kernels' cases in Triton's interpreter, in a process of its own: it is chosen at import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.mark.parametrize(
    ("cases", "which"),
    [
        ("cases", "not hardening"),
        ("product_cases", "not hardening"),
        pytest.param("cases", "hardening", marks=pytest.mark.hardening),
        pytest.param("engine_cases", "not hardening", marks=pytest.mark.hardening),
    ],
)
def test_kernels_equal_the_reference_in_the_interpreter(cases: str, which: str, tmp_path: Path):
    source = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", f"-ocache_dir={tmp_path}"]
    ran = subprocess.run(
        [*command, "-m", which, str(TESTS / "interpret" / f"{cases}.py")],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
