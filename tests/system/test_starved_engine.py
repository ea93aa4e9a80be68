"""An engine that gets no processor is left alone; one that is stopped is replaced."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headway.core.request import Request, SamplingParams
from headway.frontend.process import ProcessClient

PROGRAM = Path(__file__).with_name("deadly_engine.py")
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
TIMEOUT_S, STARVED_S = 1.5, 6.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux' /proc")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ProcessClient]:
    opened = ProcessClient(
        lambda sockets: [sys.executable, str(PROGRAM), str(tmp_path), str(sockets)],
        tokenizer=None,
        timeout_s=TIMEOUT_S,
    )
    await opened.start()
    yield opened
    await opened.stop()


@contextlib.contextmanager
def starving(pid: int) -> Iterator[None]:
    """Every thread of a process gets a thousandth of one core, on which others are busy."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", BUSY, str(core)]
    hogs = [subprocess.Popen(command) for _ in range(3)]
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for thread in threads:
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.sched_setaffinity(thread, os.sched_getaffinity(0))
        for hog in hogs:
            hog.kill()
            hog.wait()


async def answered(client: ProcessClient, number: int) -> int:
    """How many tokens a request gets."""
    sampling = SamplingParams(temperature=0, max_tokens=8, seed=1)
    stream, count = client.submit(Request(number, [1, 2], sampling)), 0
    while deltas := await stream.next():
        count += sum(len(delta.token_ids) for delta in deltas)
    stream.close()
    return count


@pytest.mark.parametrize("when", ["starting", "ready"])
async def test_a_stopped_engine_is_found_within_three_seconds(tmp_path: Path, when: str) -> None:
    """With the timeout that servers have; one that is stopped for a moment goes on."""
    client = ProcessClient(
        lambda sockets: [sys.executable, str(PROGRAM), str(tmp_path), str(sockets)], tokenizer=None
    )
    starting = asyncio.create_task(client.start())
    try:
        while client.pid is None:
            await asyncio.sleep(0.01)
        if when == "ready":
            await starting
            await client.wait_ready()
        first = client.pid
        os.kill(first, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(first, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert client.num_restarts == 0 and client.pid == first
        os.kill(first, signal.SIGSTOP)
        began_s = time.monotonic()
        while client.pid == first:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_s < 3.0
        await starting
        await client.wait_ready()
        assert await answered(client, 1) == 8
    finally:
        await client.stop()


@pytest.mark.hardening
async def test_an_engine_that_gets_no_processor_is_not_replaced(client: ProcessClient) -> None:
    """Neither while it starts nor when it is ready; one that is stopped is found all the same."""
    while client.pid is None:
        await asyncio.sleep(0.01)
    with starving(client.pid):
        await asyncio.sleep(STARVED_S)
    await client.wait_ready()
    first = client.pid
    with starving(first):
        await asyncio.sleep(STARVED_S)
        assert client.num_restarts == 0 and client.ready
    assert await answered(client, 1) == 8
    assert client.num_restarts == 0 and client.pid == first
    os.kill(first, signal.SIGSTOP)
    began_s = time.monotonic()
    while client.num_restarts == 0:
        await asyncio.sleep(0.01)
    assert time.monotonic() - began_s < 2 * TIMEOUT_S
