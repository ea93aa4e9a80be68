"""The README's blocks run: the client's against a real server on the embedded model."""

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer

from headway.cli.common import EMBEDDED, model_folder
from headway.config.options import reference

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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


def test_curl_says_the_same(server: LiveServer) -> None:
    """Each curl command, whole or streamed, answers 2 + 3 = 5 and is not sampled."""
    blocks = re.findall(r"```sh\n(curl .*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        body = json.loads(re.search(r"-d '(.*)'", block, re.DOTALL)[1])
        assert body["temperature"] == 0
        command = block.replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if body.get("stream"):
            chunks = [json.loads(line) for line in re.findall(r"data: (\{.*)", done.stdout)]
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        else:
            text = json.loads(done.stdout)["choices"][0]["message"]["content"]
        assert text == "2 + 3 = 5."


def test_no_page_installs_an_extra_from_an_index() -> None:
    """The package is in no index yet: an extra is installed in a clone, as '.[ray]'."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = [page.name for page in pages if re.search(r"headway\[\w+\]", page.read_text())]
    assert set(found) <= {"lab-log.md"}


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
