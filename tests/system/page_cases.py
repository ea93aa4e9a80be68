"""What the tests of the page share: its servers, a browser, a load, and what a user does.

Whoever imports its fixtures names them in FIXTURES: pytest finds them there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from browser import PATIENCE_MS, OpenPage, Visit, chromium, visits
from live_server import NO_TORCH, LiveServer
from scripted import ScriptedServer, scripted
from tool_scripts import HERMES

import headway

EMBEDDED = Path(headway.__file__).parent / "embedded" / "headway-tiny"
FLAGS = (
    "--kv-memory=32MiB",
    "--price-per-hour=0.2",
    "--slo=ttft=20s,tpot=2s",
    "--slo=interactive:ttft=300ms,tpot=50ms",
)
PHONE = {"width": 360, "height": 740}
TICK_MS = 10.0
DONE = "TTFT .* tokens? in "
"""What stands under a whole answer; its speed too, where it has more than one token."""


@pytest.fixture(scope="module")
def embedded() -> Iterator[LiveServer]:
    """The model that comes along, with a price and two classes."""
    live = LiveServer(EMBEDDED, *FLAGS)
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    """A server whose steps take 10 ms and whose answers are nonsense as long as the context."""
    live = LiveServer(EMBEDDED, NO_TORCH, "--kv-memory=32MiB", "--api-key=sesame")
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose model writes down its reasoning first."""
    with scripted(tmp_path_factory.mktemp("thinking") / "hermes", HERMES) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Any) -> AsyncIterator[OpenPage]:
    async with visits(browser) as open_page:
        yield open_page


@contextlib.asynccontextmanager
async def load(url: str, streams: int = 4) -> AsyncIterator[None]:
    """Keep `streams` answers running, each followed by another, until the block ends."""

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "headway-tiny",
            "messages": [{"role": "user", "content": "Tell me of the sea. " * (5 + 6 * number)}],
            "stream": True,
            "max_tokens": 150 + 30 * number,
            "ignore_eos": True,
            "service_class": "interactive" if number % 2 else "default",
        }
        while True:
            async with session.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content:
                    pass

    async with aiohttp.ClientSession(url) as session:
        tasks = [asyncio.create_task(keep_asking(session, i)) for i in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def ask(one: Visit, text: str) -> None:
    await one.page.fill("#chat-input", text)
    await one.page.press("#chat-input", "Enter")


async def set_option(one: Visit, name: str, value: str) -> None:
    await one.page.click("#chat-options summary")
    await one.page.fill(f"#chat-{name}", value)


def answer_of(turn: int) -> str:
    """The selector of the page's n-th answer."""
    return f".turn.assistant:nth-of-type({2 * turn})"


async def keyed(page: Any) -> None:
    """The key as a visitor of earlier has it."""
    await page.add_init_script("sessionStorage.setItem('headway-key', 'sesame')")


async def ticks_of(one: Visit) -> list[float]:
    """How long the script of each tick took, in ms."""
    found: list[float] = await one.page.evaluate(
        "import('/page/main.js').then((module) => module.ticks)"
    )
    return found


async def wait_ticks(one: Visit, count: int) -> None:
    async with asyncio.timeout(PATIENCE_MS / 1e3 + 2 * count):
        while len(await ticks_of(one)) < count:
            await asyncio.sleep(0.1)
