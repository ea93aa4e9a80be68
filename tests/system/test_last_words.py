"""What an engine process says before it ends is heard, also on a machine that is busy."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.frontend.process import ProcessClient

PROGRAM = """
import sys
from pathlib import Path
from headway.core.errors import HeadwayError
from headway.engine.process import serve_engine

def build(progress):
    raise HeadwayError("There is no room.", "Make some.")

sys.exit(serve_engine(Path(sys.argv[1]), build))
"""
NUM_STARTS = 4


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Twice as many processes as cores that do nothing but compute."""
    number = 2 * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def starve_readers() -> None:
    """ZeroMQ's threads in this process read only when no other wants a core."""
    readers = [int(t.name) for t in Path("/proc/self/task").iterdir() if is_reader(t)]
    assert readers
    for thread in readers:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def is_reader(thread: Path) -> bool:
    """Whether it is one of ZeroMQ's, and has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "ZMQ" in (thread / "comm").read_text()
    return False


async def why_not() -> str:
    """Start an engine that cannot start; the reason it gives."""
    client = ProcessClient(
        lambda sockets: [sys.executable, "-c", PROGRAM, str(sockets)], tokenizer=None
    )
    await client.start()
    starve_readers()
    try:
        with pytest.raises(HeadwayError) as raised:
            await client.wait_ready()
    finally:
        await client.stop()
    assert client.num_restarts == 0
    return raised.value.cause


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads cannot be starved here")
@pytest.mark.usefixtures("busy_machine")
async def test_an_engine_that_cannot_start_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        said = await asyncio.gather(*(why_not() for _ in range(NUM_STARTS)))
    assert said == ["There is no room."] * NUM_STARTS
    assert not caplog.records
