"""The README's blocks run: the client's against a real server on the embedded model."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer

from headway.cli.common import EMBEDDED, model_folder
from headway.config.options import reference

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """The embedded model, which is served where no folder is named."""
    live = LiveServer(None)
    try:
        yield live.wait_ready()
    finally:
        live.close()


def run(block: str) -> str:
    """What a block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_client_streams_a_chat(server: LiveServer) -> None:
    block = next(block for block in BLOCKS if "OpenAI" in block)
    assert run(block.replace("http://127.0.0.1:8000", server.url)) == "2 + 3 = 5."


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
