"""The server that shows all that a request can tell it, and the official clients on it.

Whoever imports its fixtures names them in FIXTURES: pytest finds them there.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import surface
from live_server import LiveServer
from surface_clients import (
    ENDPOINTS,
    USER,
    Ask,
    Clients,
)
from tiny_model import write_tiny_model

INPUT: dict[str, Any] = {"model": "tiny", "input": USER, "temperature": 0, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose template shows all that a request can tell it."""
    folder = write_tiny_model(tmp_path_factory.mktemp("surface") / "tiny")
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": surface.TEMPLATE}
    path.write_text(json.dumps(config))
    live = LiveServer(folder, "--served-model-name=tiny,nickname", "--kv-memory=64MiB")
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def clients(told: LiveServer) -> Iterator[Clients]:
    with (
        openai.OpenAI(base_url=told.url + "/v1", api_key="none", max_retries=0) as first,
        anthropic.Anthropic(base_url=told.url, api_key="none", max_retries=0) as second,
    ):
        yield Clients(first, second)


@pytest.fixture(scope="module")
def asks(clients: Clients) -> dict[tuple[str, bool], Ask]:
    """How to ask each endpoint, whole and streamed; the plain answers are kept."""
    return {(path, s): clients.ask(path, s) for path in ENDPOINTS for s in (False, True)}
