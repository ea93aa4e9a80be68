"""A process that is not let run is told from one that is stopped, sleeps, or computes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.frontend.liveness import RunQueue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux' /proc")
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
LOOK_S, LOOKS = 0.1, 10


@pytest.fixture
def core() -> int:
    return min(os.sched_getaffinity(0))


@pytest.fixture
def starved(core: int) -> Iterator[subprocess.Popen[bytes]]:
    """A busy loop that gets no more than a three-hundredth of its core."""
    command = [sys.executable, "-c", BUSY, str(core)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    os.sched_setscheduler(processes[0].pid, os.SCHED_IDLE, os.sched_param(0))
    yield processes[0]
    for process in processes:
        process.kill()
        process.wait()


def share(pid: int) -> float:
    """Of a while, what a thread of the process waited for a processor."""
    queue, found_s, began_s = RunQueue(), 0.0, time.monotonic()
    queue.waited_s(pid, 0.0)
    last_s = began_s
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        now_s = time.monotonic()
        found_s += queue.waited_s(pid, now_s - last_s)
        last_s = now_s
    return found_s / (last_s - began_s)


def test_a_process_without_a_processor_waits(starved: subprocess.Popen[bytes]) -> None:
    assert share(starved.pid) > 0.5


def test_a_stopped_process_waits_for_nothing(starved: subprocess.Popen[bytes]) -> None:
    os.kill(starved.pid, signal.SIGSTOP)
    while " T " not in Path(f"/proc/{starved.pid}/stat").read_text():
        time.sleep(0.01)
    assert share(starved.pid) == 0.0


def test_a_process_that_sleeps_waits_for_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert share(process.pid) < 0.1
        process.kill()


def test_a_process_that_is_gone_has_no_threads() -> None:
    assert RunQueue().waited_s(2**22 + 1, 1.0) == 0.0
