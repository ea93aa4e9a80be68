"""The README's blocks run: the client's against a real server on the embedded model."""

import contextlib
import io
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cli.common import EMBEDDED, model_folder
from headway.core.options import reference

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    command = [sys.executable, "-m", "headway.cli.main", "serve", f"--port={free}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{free}/ready", timeout=5).close()
                break
            time.sleep(0.1)
        yield free
    finally:
        server.terminate()
        server.wait(30)


def run(block: str) -> str:
    """What a block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_client_streams_a_chat(port: int) -> None:
    block = next(block for block in BLOCKS if "OpenAI" in block)
    assert run(block.replace("8000", str(port))) == "2 + 3 = 5."


def test_the_offline_api_completes_a_prompt() -> None:
    block = next(block for block in BLOCKS if "LLM(" in block)
    printed = run(block.replace("path/to/folder", str(model_folder(None))))
    assert len(printed.strip()) > 20


def test_every_python_block_was_run() -> None:
    assert len(BLOCKS) == 2
    assert EMBEDDED in BLOCKS[0]


def test_the_page_of_options_is_written_from_the_tables() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == reference.reference()
