"""Fixtures: the tiny model, one server for all tests, and servers for those that need their own."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from live_server import Hold, LiveServer
from tiny_model import write_tiny_model

SHARED = Path(__file__).parents[3] / "shared"

StartServer = Callable[..., LiveServer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def stories() -> Path:
    """The trained model stories260K, where the shared data is."""
    folder = Path(os.environ.get("HEADWAY_SHARED", SHARED)) / "data" / "models" / "stories260K"
    if not folder.exists():
        pytest.skip("the shared data is not here")
    return folder


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    """The server that most tests share; it has two names and no key, and is a real interpreter.

    However slow the machine is, nobody who may wait is refused, and no prompt is long.
    """
    patient = ("--max-queue-wait=10m", "--long-prefill=10m")
    names = "--served-model-name=tiny,nickname"
    live = LiveServer(tiny_model, names, "--kv-memory=64MiB", *patient, real=True)
    try:
        yield live.wait_ready()
        assert live.process.poll() is None, live.stderr
        assert live.metric("engine_restarts_total") == 0, live.stderr
    finally:
        live.close()


@pytest.fixture
def start_server(tiny_model: Path) -> Iterator[StartServer]:
    """Starts servers of a test's own, and ends them with it."""
    started: list[LiveServer] = []

    def start(*flags: str, folder: Path = tiny_model, **options: Any) -> LiveServer:
        live = LiveServer(folder, "--kv-memory=64MiB", *flags, **options)
        started.append(live)
        return live

    yield start
    for live in started:
        live.close()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Keeps a dead engine's next one from starting until a test has looked."""
    return Hold(tmp_path)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client, without retries."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A raw HTTP session on the shared server."""
    async with aiohttp.ClientSession(server.url) as session:
        yield session
