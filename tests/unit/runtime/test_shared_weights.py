"""Weights in memory that processes share: whole or not there, whoever is killed whenever."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headway.core.clock import VirtualClock
from headway.runtime.shared_weights import (
    SharedWeights,
    StallDetector,
    create_shared_files,
    filled_bytes,
    is_sealed,
    lock_owner,
    stall_timeout_s,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd")

NUM_BLOBS, BLOB_BYTES = 24, 70_001

ENGINE = f"""
import os, signal, sys
from headway.runtime.shared_weights import SharedWeights

descriptor, dies_at, stops_at = map(int, sys.argv[1:])

def step(number):
    if number == stops_at:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number == dies_at:
        print("here", flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)

shared = SharedWeights(descriptor, "one")
shared.enter()
step(0)
if shared.fills:
    print("fills", flush=True)
    shared.reserve([{BLOB_BYTES}] * {NUM_BLOBS})
    for i in range({NUM_BLOBS}):
        part = bytes((i + at) % 251 for at in range({BLOB_BYTES}))
        kept = shared.keep(str(i), [memoryview(part[:9]), memoryview(part[9:])])
        assert bytes(kept) == part
        step(1 + i)
    shared._collapse = lambda: step({NUM_BLOBS} + 1)
    shared._unlock = lambda: step({NUM_BLOBS} + 2)
    shared.seal()
else:
    assert shared.is_whole
for i in range({NUM_BLOBS}):
    assert bytes(shared.blobs[str(i)]) == bytes((i + at) % 251 for at in range({BLOB_BYTES})), i
print("read", flush=True)
"""
"""An engine that says where it is and ends there, or stops until it is told to go on; the last two
steps are before and behind the seal."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    (found,) = create_shared_files(1)
    yield found
    os.close(found)


def begin(descriptor: int, dies_at: int = -1, stops_at: int = -1) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ENGINE, *map(str, (descriptor, dies_at, stops_at))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, pass_fds=[descriptor], text=True, **pipes)


def begin_and_die(descriptor: int, dies_at: int) -> "subprocess.Popen[str]":
    """One that waits there until `end`."""
    engine = begin(descriptor, dies_at)
    assert engine.stdout is not None
    while engine.stdout.readline() != "here\n":
        assert engine.poll() is None
    return engine


def end(engine: "subprocess.Popen[str]") -> list[str]:
    said, _ = engine.communicate(timeout=120)
    return said.split()


def fill(descriptor: int, key: str = "one", text: bytes = b"abc") -> SharedWeights:
    shared = SharedWeights(descriptor, key)
    shared.enter()
    assert shared.fills and not shared.is_whole
    shared.reserve([len(text), 0])
    assert bytes(shared.keep("a", [memoryview(text)])) == text
    assert bytes(shared.keep("b", [memoryview(b"")])) == b""
    return shared


def test_the_first_fills_it_and_nobody_changes_it(descriptor: int):
    """Behind the seal not even who filled it; the file is the user's alone and has no name."""
    shared = fill(descriptor)
    assert not is_sealed(descriptor)
    shared.seal()
    assert is_sealed(descriptor) and shared.is_whole and not shared.fills
    for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 1)):
        with pytest.raises(PermissionError):
            change()
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert "deleted" in os.readlink(f"/proc/self/fd/{descriptor}")
    again = SharedWeights(descriptor, "one")
    again.enter()
    assert {name: bytes(blob) for name, blob in again.blobs.items()} == {"a": b"abc", "b": b""}
    with pytest.raises(AssertionError):
        again.keep("c", [])


def test_weights_of_other_files_are_nobodys(descriptor: int):
    fill(descriptor).seal()
    other = SharedWeights(descriptor, "two")
    other.enter()
    assert other.has_other_key and not other.is_whole and not other.fills
    other.leave()
    assert is_sealed(descriptor)


def test_who_leaves_it_leaves_nothing(descriptor: int):
    shared = fill(descriptor, text=bytes(100_000))
    assert filled_bytes([descriptor]) >= 100_000
    shared.leave()
    assert filled_bytes([descriptor]) == 0
    fill(descriptor, "two", b"other").seal()
    assert shared._entries and not shared.is_whole


def test_blobs_begin_where_kernels_may_read_them(descriptor: int):
    """At multiples of 64 of memory, the first at one of 2 MiB."""
    shared = SharedWeights(descriptor, "one")
    shared.enter()
    shared.reserve([1, 3, 5])
    for name, size in (("a", 1), ("b", 3), ("c", 5)):
        shared.keep(name, [memoryview(bytes(size))])
    shared.seal()
    assert shared._address % 2**21 == 0
    assert [begin for begin, _ in shared._entries.values()] == [0, 64, 128]


def test_one_fills_while_others_wait(descriptor: int):
    """Of five at once one packs; another looks in between and is told to wait."""
    shared = fill(descriptor)
    waiting = [begin(descriptor) for _ in range(3)]
    code = (
        "import sys; from headway.runtime.shared_weights import SharedWeights\n"
        f"shared = SharedWeights({descriptor}, 'one'); shared.enter(waits=False)\n"
        "print(shared.is_whole, shared.fills, shared.has_other_key)"
    )
    looked = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[descriptor], capture_output=True, check=True
    )
    assert looked.stdout.split() == [b"False"] * 3
    assert all(engine.poll() is None for engine in waiting)
    shared.leave()
    said = [end(engine) for engine in waiting]
    assert sorted(said) == [["fills", "read"], ["read"], ["read"]]


@pytest.mark.parametrize("dies_at", [0, 1, NUM_BLOBS, NUM_BLOBS + 1])
def test_the_next_begins_anew_where_one_was_killed(descriptor: int, dies_at: int):
    """Between any two steps; of those that waited meanwhile one fills it."""
    first = begin_and_die(descriptor, dies_at)
    others = [begin(descriptor) for _ in range(2)]
    end(first)
    assert first.returncode == -signal.SIGKILL
    assert sorted(end(engine) for engine in others) == [["fills", "read"], ["read"]]
    assert [engine.returncode for engine in others] == [0, 0] and is_sealed(descriptor)


def test_who_is_killed_behind_the_seal_has_filled_it(descriptor: int):
    first = begin_and_die(descriptor, NUM_BLOBS + 2)
    end(first)
    assert first.returncode == -signal.SIGKILL and is_sealed(descriptor)
    assert end(begin(descriptor)) == ["read"]


def test_kills_at_any_moment(descriptor: int):
    """Two of three are killed after a time that nobody chose; the third reads what is right."""
    rng = random.Random(1)
    for _ in range(6):
        engines = [begin(descriptor) for _ in range(3)]
        time.sleep(rng.uniform(0.02, 0.3))
        for engine in engines[:2]:
            engine.kill()
        said = [end(engine) for engine in engines]
        assert said[2][-1] == "read" and engines[2].returncode == 0
        (empty,) = create_shared_files(1)
        os.dup2(empty, descriptor, inheritable=False)
        os.close(empty)


@pytest.fixture
def stopped(descriptor: int) -> Iterator["subprocess.Popen[str]"]:
    """One that is stopped in the middle and has the lock."""
    engine = begin(descriptor, stops_at=NUM_BLOBS // 2)
    os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)
    yield engine
    engine.kill()
    engine.communicate()


def test_who_packs_and_is_stopped_is_not_waited_for(descriptor: int, stopped, caplog):
    """A warning names it; when it goes on it fills the file, and who comes then shares it."""
    waiting = SharedWeights(descriptor, "one", stall_timeout_s=0.3)
    with caplog.at_level(logging.WARNING):
        waiting.enter()
    assert waiting.gave_up and not waiting.fills and not waiting.is_whole
    assert f"process {stopped.pid} has packed nothing" in caplog.text
    assert lock_owner(descriptor) == stopped.pid and not is_sealed(descriptor)
    waiting.enter()  # it does not wait again
    waiting.leave()
    assert filled_bytes([descriptor]) >= NUM_BLOBS // 2 * BLOB_BYTES, "what it packed is there"
    stopped.send_signal(signal.SIGCONT)
    assert end(stopped) == ["fills", "read"]
    assert end(begin(descriptor)) == ["read"] and lock_owner(descriptor) == 0


def test_who_goes_on_in_time_is_waited_for(descriptor: int, stopped):
    waiting = begin(descriptor)
    stopped.send_signal(signal.SIGCONT)
    assert end(waiting) == ["read"] and end(stopped) == ["fills", "read"]


def test_as_long_as_it_grows_it_does_not_stand_still():
    """Nine seconds between two blobs are no ten; an engine that begins anew makes it smaller."""
    clock = VirtualClock()
    standstill = StallDetector(10.0, clock)
    for number in (0, 5, 6, 0, 1):
        assert not standstill.is_stalled(number)
        clock.advance(9.0)
        assert not standstill.is_stalled(number)
        clock.advance(0.9)
    assert not standstill.is_stalled(1)
    clock.advance(0.2)
    assert standstill.is_stalled(1)
    assert not standstill.is_stalled(2)


def test_larger_models_may_take_longer():
    """A minute, and what a disk takes that reads 50 MB a second."""
    assert stall_timeout_s(0) == 60.0
    assert stall_timeout_s(140 * 10**9) == 60 + 2800


def test_there_are_none_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert create_shared_files(2) == []
