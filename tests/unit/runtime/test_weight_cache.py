"""Packed weights on disk: believed only when every byte is right, bounded, the user's alone."""

import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headway.core.clock import SystemClock, VirtualClock
from headway.runtime import weight_key
from headway.runtime.memory import gives_huge_pages
from headway.runtime.weight_cache import EMBEDDING, MAGIC, Blobs, WeightCache, default_folder
from headway.runtime.weight_key import content_digest

LIMIT = 1 << 20


def blobs(seed: int = 1, size: int = 1000) -> Blobs:
    """Four: one in two parts, one empty, one that stays in the file where others do not."""
    text = bytes((seed + i) % 251 for i in range(size))
    return {
        "a.0": [memoryview(text)],
        "b.0": [memoryview(text[:7]), memoryview(text[7:90])],
        "c.0": [memoryview(b"")],
        EMBEDDING: [memoryview(text[:99])],
    }


def plain(found) -> dict[str, bytes] | None:
    return None if found is None else {name: bytes(part) for name, part in found.items()}


def joined(given: Blobs) -> dict[str, bytes]:
    return {name: b"".join(map(bytes, parts)) for name, parts in given.items()}


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "weights", LIMIT)


def test_what_was_written_is_read_and_nothing_else(cache):
    assert cache.read("one") is None
    cache.write("one", blobs())
    assert plain(cache.read("one")) == joined(blobs())
    assert cache.read("another") is None
    cache.check_integrity()


@pytest.mark.parametrize("room_bytes", [0, LIMIT])
def test_what_is_read_stays_and_is_ours_to_change(cache, room_bytes):
    """A change stays in this process; what comes in place of the file changes nothing."""
    cache.write("one", blobs())
    found, again = cache.read("one", room_bytes), cache.read("one", room_bytes)
    found["a.0"][0] = 99
    assert plain(again) == plain(cache.read("one")) == joined(blobs())
    cache.write("one", blobs(2))
    cache.trim(0)
    assert plain(again) == joined(blobs())


@settings(max_examples=150, deadline=None)
@given(
    at=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    room_bytes=st.sampled_from([0, LIMIT]),
)
def test_one_changed_byte_anywhere_is_a_miss(at, flip, room_bytes):
    """In the magic, a digest, a length, the header or a blob; what fills up to 64 is not read."""
    with tempfile.TemporaryDirectory() as folder:
        cache = WeightCache(Path(folder) / "weights", LIMIT)
        cache.write("one", blobs())
        path = cache.path("one")
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= flip
        path.write_bytes(content)
        assert plain(cache.read("one", room_bytes)) in (None, joined(blobs()))
        if int(at * len(content)) < len(MAGIC) + 40 + 100:
            assert cache.read("one", room_bytes) is None
        cache.write("one", blobs())
        assert plain(cache.read("one", room_bytes)) == joined(blobs())


@pytest.mark.parametrize("keep", [0, 5, 40, 200, 700, 1400])
def test_a_truncated_file_is_a_miss_and_is_written_anew(cache, keep):
    cache.write("one", blobs())
    path = cache.path("one")
    os.truncate(path, keep)
    assert cache.read("one") is cache.read("one", LIMIT) is None
    cache.write("one", blobs())
    assert plain(cache.read("one")) == joined(blobs())


def test_a_file_of_another_key_under_this_name_is_a_miss(cache):
    cache.write("one", blobs())
    cache.path("one").rename(cache.path("two"))
    assert cache.read("two") is None


def test_folder_and_files_are_the_users_alone(cache):
    cache.folder.mkdir(parents=True, mode=0o755)
    cache.write("one", blobs())
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.path("one").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_believed(cache, mode):
    cache.write("one", blobs())
    cache.path("one").chmod(mode)
    assert cache.read("one") is None


def test_a_link_is_not_followed(cache, tmp_path):
    cache.write("one", blobs())
    cache.path("one").rename(tmp_path / "elsewhere")
    cache.path("one").symlink_to(tmp_path / "elsewhere")
    assert cache.read("one") is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    cache = WeightCache(tmp_path / "file" / "weights", LIMIT)
    cache.write("one", blobs())
    assert cache.read("one") is None


def test_the_least_recently_used_go_first(tmp_path):
    clock = VirtualClock(wall_s=time.time())
    cache = WeightCache(tmp_path, 3 * 12_000, clock)
    for name in "abc":
        cache.write(name, blobs(size=9_000))
        clock.advance(1)
    assert cache.read("a") is not None
    clock.advance(1)
    cache.write("d", blobs(size=9_000))
    assert [name for name in "abcd" if cache.read(name)] == ["a", "c", "d"]
    cache.write("huge", blobs(size=40_000))
    assert cache.read("huge") is None
    assert cache.read("d") is not None
    cache.check_integrity()


def test_what_a_dead_writer_left_goes_after_an_hour(tmp_path):
    clock = VirtualClock(wall_s=time.time())
    cache = WeightCache(tmp_path, LIMIT, clock)
    (tmp_path / "x.part").write_bytes(b"half")
    cache.trim(LIMIT)
    assert (tmp_path / "x.part").exists()
    clock.advance(4000)
    cache.trim(LIMIT)
    assert not (tmp_path / "x.part").exists()


class Operations(RuleBasedStateMachine):
    """Random writes, reads, damage and losses: never a wrong byte, never too much on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._clock = VirtualClock(wall_s=time.time())
        self.cache = WeightCache(Path(self._folder.name) / "weights", 20_000, self._clock)
        self.written: dict[str, Blobs] = {}

    @rule(key=st.sampled_from("abcdef"), seed=st.integers(0, 250), size=st.integers(0, 25_000))
    def write(self, key, seed, size):
        self._clock.advance(1)
        self.cache.write(key, blobs(seed, size))
        self.written[key] = blobs(seed, size)

    @rule(key=st.sampled_from("abcdef"), room_bytes=st.sampled_from([0, 9_000, 1 << 20]))
    def read(self, key, room_bytes):
        found = plain(self.cache.read(key, room_bytes))
        assert found is None or found == joined(self.written[key])

    @rule(key=st.sampled_from("abcdef"), at=st.floats(0, 1, exclude_max=True))
    def damage(self, key, at):
        path = self.cache.path(key)
        if path.exists():
            content = bytearray(path.read_bytes())
            content[int(at * len(content))] ^= 1
            path.write_bytes(content)

    @rule(key=st.sampled_from("abcdef"))
    def lose(self, key):
        self.cache.path(key).unlink(missing_ok=True)

    @invariant()
    def holds(self):
        self.cache.check_integrity()

    def teardown(self) -> None:
        self._folder.cleanup()


Operations.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
test_operations = Operations.TestCase


WRITER = """
import sys
from pathlib import Path
from headway.runtime.weight_cache import WeightCache
seed = int(sys.argv[2])
part = bytes((seed + i) % 251 for i in range(60_000))
cache = WeightCache(Path(sys.argv[1]), 1 << 20)
for _ in range(15):
    cache.write("one", {"a.0": [memoryview(part)]})
    found = cache.read("one")
    assert found is not None
    got = bytes(found["a.0"])
    assert got in [bytes((s + i) % 251 for i in range(60_000)) for s in (1, 2)]
"""


def test_two_processes_at_once(tmp_path):
    """Each reads whole files only, its own or the other's, and no part of one stays."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "weights")]
    writers = [subprocess.Popen([*command, str(seed)]) for seed in (1, 2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "headway" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "headway" / "weights"


# ── memory of one's own ─────────────────────────────────────────────────────────────────────────

LARGE = 9 << 20
READER = """
import ctypes, logging, sys
from pathlib import Path
from headway.runtime.weight_cache import WeightCache
folder, room_bytes, has_huge_pages = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
if not has_huge_pages:
    assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
found = WeightCache(Path(folder), 1 << 30).read("one", room_bytes)
assert sum(map(sum, found.values())) == int(sys.argv[4])
print(Path("/proc/self/smaps").read_text())
"""


def held(cache: WeightCache, room_bytes: int, *, huge: bool = True) -> tuple[int, int, str]:
    """(bytes in huge pages, bytes of the file that are mapped, what is told) of a process."""
    total = sum(sum(map(sum, parts)) for parts in large().values())
    arguments = [str(cache.folder), str(room_bytes), str(huge), str(total)]
    said = subprocess.check_output([sys.executable, "-c", READER, *arguments], text=True)
    sizes = dict.fromkeys(("AnonHugePages", "Rss of the file"), 0)
    in_file = False
    for line in said.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_file = line.endswith(".weights")
        elif line.startswith("AnonHugePages:"):
            sizes["AnonHugePages"] += int(line.split()[1]) << 10
        elif line.startswith("Rss:") and in_file:
            sizes["Rss of the file"] += int(line.split()[1]) << 10
    return sizes["AnonHugePages"], sizes["Rss of the file"], said


def large() -> Blobs:
    return {"a.0": [memoryview(bytes(range(256)) * (LARGE >> 8))], EMBEDDING: [memoryview(b"ab")]}


@pytest.fixture
def large_cache(tmp_path: Path) -> WeightCache:
    if sys.platform != "linux":
        pytest.skip("there is no smaps")
    cache = WeightCache(tmp_path / "weights", 1 << 30)
    cache.write("one", large())
    return cache


def test_what_a_step_reads_lies_in_huge_pages(large_cache):
    """Of 9 MiB at least 6 whatever they begin at; the embedding's page alone is the file's."""
    if not gives_huge_pages():
        pytest.skip("the system gives no huge pages")
    huge, in_file, _ = held(large_cache, LARGE + 64)
    assert huge >= 6 << 20
    assert 0 < in_file < 1 << 20


def test_without_room_it_stays_in_the_file(large_cache):
    huge, in_file, said = held(large_cache, LARGE - 1)
    assert huge == 0 and in_file >= LARGE
    assert "stay in their file: only" in said


def test_without_huge_pages_it_stays_in_the_file(large_cache):
    """In a process that may have none, whatever the system's settings are."""
    huge, in_file, said = held(large_cache, 1 << 30, huge=False)
    assert huge == 0 and in_file >= LARGE
    assert "stay in their file: the system gives no huge pages" in said


def test_memory_that_is_refused_is_told(cache, monkeypatch, caplog):
    def refuse(num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    cache.write("one", blobs())
    monkeypatch.setattr("headway.runtime.weight_cache.gives_huge_pages", lambda: True)
    monkeypatch.setattr("headway.runtime.weight_cache.zeros", refuse)
    with caplog.at_level(logging.DEBUG):
        assert plain(cache.read("one", LIMIT)) == joined(blobs())
    assert "Cannot allocate memory" in caplog.text


# ── content of the checkpoint ───────────────────────────────────────────────────────────────────


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that were read to be hashed."""
    names: list[str] = []
    plain_digest = weight_key.hashlib.file_digest

    def noted(file, algorithm):
        names.append(Path(f"/proc/self/fd/{file.fileno()}").readlink().name)
        return plain_digest(file, algorithm)

    monkeypatch.setattr(weight_key.hashlib, "file_digest", noted)
    return names


def wait_for_a_tick(path: Path) -> None:
    """Until the file system's clock has moved on since `path` was changed."""
    probe = path.with_suffix(".probe")
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_mtime_ns > path.stat().st_ctime_ns:
            return
        time.sleep(0.005)


def test_content_is_hashed_once_and_again_after_a_change(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(weight_key, "MTIME_SETTLED_S", -1.0)
    path, notes, clock = tmp_path / "w", tmp_path / "digests", SystemClock()
    path.write_bytes(b"one")
    first = content_digest(path, notes, clock)
    assert content_digest(path, notes, clock) == first
    assert hashed == ["w"]
    wait_for_a_tick(path)
    path.write_bytes(b"two")
    times = path.stat()
    second = content_digest(path, notes, clock)
    assert second != first
    wait_for_a_tick(path)
    path.write_bytes(b"six")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the time of change tells still
    assert content_digest(path, notes, clock) not in (first, second)
    assert hashed == ["w"] * 3


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path, hashed):
    path, notes = tmp_path / "w", tmp_path / "digests"
    path.write_bytes(b"one")
    clock = VirtualClock(wall_s=path.stat().st_ctime + 1.0)
    content_digest(path, notes, clock)
    content_digest(path, notes, clock)
    assert hashed == ["w", "w"]
    assert not notes.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"identity": 1, "sha256": 2}'])
def test_a_damaged_note_is_not_believed(tmp_path, content, monkeypatch):
    monkeypatch.setattr(weight_key, "MTIME_SETTLED_S", -1.0)
    path, notes = tmp_path / "w", tmp_path / "digests"
    path.write_bytes(b"one")
    digest = content_digest(path, notes, SystemClock())
    (note,) = notes.iterdir()
    note.write_bytes(content)
    assert content_digest(path, notes, SystemClock()) == digest


def test_notes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_key, "MTIME_SETTLED_S", -1.0)
    monkeypatch.setattr(weight_key, "MAX_REMEMBERED_DIGESTS", 3)
    for name in "abcdef":
        (tmp_path / name).write_bytes(name.encode())
        content_digest(tmp_path / name, tmp_path / "digests", SystemClock())
    assert len(list((tmp_path / "digests").iterdir())) == 3
