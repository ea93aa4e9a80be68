"""The server of a scripted model that calls tools, and the official client on it.

Whoever imports its fixtures names them in FIXTURES: pytest finds them there.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import ScriptedServer, scripted
from tool_scripts import (
    HERMES,
    MESSAGES,
    TOOLS,
)

from headway.core.grammar import Grammar


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model that writes Hermes calls and may think."""
    with scripted(tmp_path_factory.mktemp("scripted") / "hermes", HERMES) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with connected(server) as opened:
        yield opened


def connected(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "script", "messages": MESSAGES, "tools": TOOLS, **fields}
    return client.chat.completions.create(**{k: v for k, v in asked.items() if v is not None})


def grammar(server: ScriptedServer) -> Grammar | None:
    return server.client.asked[-1].sampling.grammar
