"""The folder where ranks find each other: it goes with them, or with the next that is made."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.config.parallel import Parallel
from headway.runtime.parallel import meeting
from headway.runtime.parallel.meeting import Meeting, sums_path, try_lock

TWO = Parallel(size=2)
ELSEWHERE = """
import sys, time
from pathlib import Path
from headway.config.parallel import Parallel
from headway.runtime.parallel import meeting
meeting.SHARED_FOLDER = Path(sys.argv[1])
print(meeting.Meeting(Parallel(size=2)).folder, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made, in place of the memory that all servers of a machine share."""
    monkeypatch.setattr(meeting, "SHARED_FOLDER", tmp_path)
    return tmp_path


@contextmanager
def another_process(within: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """(its folder, a process whose ranks start)."""
    command = [sys.executable, "-c", ELSEWHERE, str(within)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
        process.kill()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(within: Path):
    """A running process keeps its folder while others make theirs."""
    with another_process(within) as (left, killed), another_process(within) as (lives, _):
        assert sums_path(left, 0).stat().st_size == sums_path(lives, 0).stat().st_size > 0
        Meeting(TWO).end()
        assert left.exists()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        own = Meeting(TWO)
        assert sorted(within.iterdir()) == sorted([lives, own.folder])
        own.end()
        own.end()
        assert list(within.iterdir()) == [lives]


def test_a_sweep_removes_no_new_folder(within: Path):
    """Eight threads make folders, sweep and end them: each has its own until it ends it."""

    def work(_: int) -> bool:
        one = Meeting(Parallel(size=2, transport="gloo"))
        is_there = one.folder.is_dir() and try_lock(one.folder) is None
        one.end()
        return is_there and not one.folder.exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert list(within.iterdir()) == []


def test_links_with_the_prefix_are_not_followed(within: Path):
    """The target of the link is not removed."""
    kept = within / "kept"
    kept.mkdir()
    (within / f"{meeting.PREFIX}link").symlink_to(kept)
    Meeting(TWO).end()
    assert kept.is_dir()


FULL = """
import sys
from pathlib import Path
from headway.config.parallel import Parallel
from headway.runtime.parallel import meeting
meeting.SHARED_FOLDER = Path(sys.argv[1])
try:
    with open(meeting.SHARED_FOLDER / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    pass
for parallel in (Parallel(size=2), Parallel(stages=2), Parallel(size=2, transport="gloo")):
    found = meeting.Meeting(parallel)
    rows = found.folder / "rows-0"
    rows.write_bytes(bytes(4096))
    print(found.parallel.transport, found.folder.is_relative_to(meeting.SHARED_FOLDER))
    found.end()
    assert not found.folder.exists()
print(len(list(meeting.SHARED_FOLDER.iterdir())), "left")
"""
MOUNTED = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'


def test_ranks_meet_on_the_disk_where_the_shared_memory_is_full(tmp_path: Path):
    """A real full tmpfs, in a mount namespace of its own."""
    command = ["unshare", "-rm", "sh", "-c", MOUNTED, "sh", str(tmp_path), sys.executable, FULL]
    found = subprocess.run(command, capture_output=True, text=True)
    if "mount" in found.stderr or "unshare" in found.stderr:
        pytest.skip("no mount namespaces here")
    assert found.stdout.split() == [*["gloo", "False"] * 3, "1", "left"], found.stderr
    assert found.stderr.count("has no room for what 2 ranks share") == 3
