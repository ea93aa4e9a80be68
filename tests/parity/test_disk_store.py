"""The disk tier: blocks come back bit for bit or not at all, whatever becomes of the files."""

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch

from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.core.plan import StepPlan, StepResult, Transfer
from headway.planning import plan_settings
from headway.runtime.attention.cache import KVLayer
from headway.runtime.kvstore import segment as segments
from headway.runtime.kvstore.disk import DiskStore, InUseError
from headway.runtime.kvstore.open import open_disk
from headway.runtime.kvstore.segment import HEADER_BYTES
from headway.runtime.kvstore.transfers import DiskTransfers
from headway.runtime.transfers import TransferTable

MARK = bytes(range(32))
OWNER, OTHER = b"o" * 32, b"p" * 32
LIMIT, SIZE = 2**20, 1000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(size)))


def open_store(root, limit=LIMIT, mark=MARK, **how) -> DiskStore:
    return DiskStore(root, mark, limit, **how)


def put(store: DiskStore, numbers, owner=OWNER) -> None:
    for number in numbers:
        store.put((0, key(number)), owner, content(number))
    assert store.flush(60)


def read(store: DiskStore, numbers, size=SIZE) -> list[memoryview] | None:
    came, landed = [], threading.Event()
    blocks = [(0, key(number)) for number in numbers]
    into = [memoryview(bytearray(size)) for _ in blocks]
    store.read(blocks, into, lambda has_come: (came.append(has_come), landed.set()))
    assert landed.wait(60)
    return into if came[0] else None


def test_blocks_are_read_by_the_next_process(tmp_path):
    first = open_store(tmp_path / "kv")
    put(first, range(9))
    assert read(first, [3, 5]) == [content(3), content(5)]
    first.close()
    second = open_store(tmp_path / "kv")
    assert sorted(second.take_news().stored) == [(0, key(number)) for number in range(9)]
    assert read(second, range(9)) == [content(number) for number in range(9)]
    assert read(second, [3, 77]) is None
    second.close()


def test_only_the_user_may_read_folders_and_files(tmp_path):
    store = open_store(tmp_path / "kv")
    put(store, range(3))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (store.root, store.folder)}
    files = {stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()}
    assert (modes, files) == ({0o700}, {0o600})
    store.close()


def test_a_second_server_does_not_get_the_folder(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(InUseError, match="another server"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_another_fingerprint_is_another_folder_and_a_moved_file_is_not_read(tmp_path):
    first = open_store(tmp_path)
    put(first, range(3))
    first.close()
    other = open_store(tmp_path, mark=bytes(32))
    (path,) = first.folder.glob("*.kv")
    other.close()
    (other.folder / path.name).write_bytes(path.read_bytes())
    again = open_store(tmp_path, mark=bytes(32))
    assert again.take_news().stored == [] and not list(again.folder.glob("*.kv"))
    again.close()


def test_the_bound_holds_and_blocks_that_are_read_stay(tmp_path):
    store = open_store(tmp_path, segment_bytes=20_000)
    for begin in range(0, 3000, 100):
        put(store, range(begin, begin + 100))
        assert read(store, [0, 1]) == [content(0), content(1)]
        assert store.num_bytes <= LIMIT
    news = store.take_news()
    assert 1000 < len(news.lost) < 3000 and read(store, [2999]) == [content(2999)]
    held = set(range(3000)) - {int.from_bytes(k, "big") for _, k in news.lost}
    assert {0, 1, 2999} <= held
    on_disk = sum(path.stat().st_size for path in store.folder.glob("*.kv"))
    assert on_disk == store.num_bytes
    store.close()


def test_a_store_that_is_closed_holds_no_file_open(tmp_path):
    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.lexists(link)]

    store = open_store(tmp_path, segment_bytes=3000)
    put(store, range(9))
    assert sum(str(tmp_path) in path for path in open_files()) == 4  # three segments and the lock
    store.close()
    assert not any(str(tmp_path) in path for path in open_files())


def test_a_large_bound_has_longer_segments_and_not_more_of_them(tmp_path):
    store = open_store(tmp_path, limit=2**40)
    assert store.segment_bytes == 2**32
    store.close()


def test_folders_of_other_fingerprints_are_removed_for_room(tmp_path):
    first = open_store(tmp_path)
    put(first, range(600))
    first.close()
    second = open_store(tmp_path, limit=LIMIT // 4, mark=bytes(32))
    assert not first.folder.exists()
    second.close()


def test_an_incomplete_end_is_cut_off(tmp_path):
    first = open_store(tmp_path)
    put(first, range(9))
    first.close()
    (path,) = first.folder.glob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    second = open_store(tmp_path)
    news = second.take_news()
    assert (len(news.stored), news.num_bad) == (8, 1)
    assert read(second, range(8)) == [content(number) for number in range(8)]
    second.close()


def flipped(tmp_path, offsets) -> None:
    """Each byte at `offsets` of a segment flipped: no block is returned with other bytes."""
    first = open_store(tmp_path)
    for number in range(4):
        first.put((0, key(number)), OWNER, content(number, 60))
    assert first.flush(60)
    first.close()
    (path,) = first.folder.glob("*.kv")
    whole = path.read_bytes()
    for at in offsets(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        store = open_store(tmp_path)
        kept = {int.from_bytes(k, "big") for _, k in store.take_news().stored}
        assert kept <= set(range(4))
        found = {number: read(store, [number], 60) for number in kept}
        assert all(data in (None, [content(number, 60)]) for number, data in found.items())
        assert sum(data is None for data in found.values()) + 4 - len(kept) >= 1
        store.close()
        for other in first.folder.glob("*.kv"):
            other.unlink()


def test_blocks_with_a_flipped_byte_are_refused(tmp_path, caplog):
    flipped(tmp_path, lambda size: random.Random(7).sample(range(size), 40))


@pytest.mark.hardening
def test_blocks_with_any_flipped_byte_are_refused(tmp_path, caplog):
    flipped(tmp_path, range)


WRITER = """
import random, sys
from pathlib import Path
from headway.runtime.kvstore.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), bytes(range(32)), 2**26)
print("ready", flush=True)
for number in range(10**6):
    content = memoryview(bytearray(random.Random(number).randbytes(1000)))
    store.put((0, number.to_bytes(32, "big")), b"o" * 32, content)
    if number % 50 == 0:
        store.flush()
"""
"""What `open_store`, `key` and `content` make, without the seconds that torch takes to load."""


def killed_while_writing(tmp_path, times: int) -> None:
    for number in range(times):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(random.Random(number).uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
        store = open_store(tmp_path, limit=2**26)
        kept = [int.from_bytes(k, "big") for _, k in store.take_news().stored]
        for each in kept[:: max(len(kept) // 50, 1)]:
            assert read(store, [each]) == [content(each)]
        store.close()


def test_a_kill_while_it_writes_leaves_whole_blocks(tmp_path):
    killed_while_writing(tmp_path, 1)


@pytest.mark.hardening
def test_fifty_kills_while_it_writes(tmp_path):
    killed_while_writing(tmp_path, 50)


def test_a_full_disk_is_logged_once_and_leaves_no_half_block(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    put(store, range(3))
    whole = segments.write_all

    def full(handle, parts, at):
        whole(handle, [bytes(parts[0])[:50]], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments, "write_all", full)
    put(store, range(3, 9))
    monkeypatch.undo()
    assert sorted(store.take_news().lost) == [(0, key(number)) for number in range(3, 9)]
    assert len([r for r in caplog.records if "free space" in r.getMessage()]) == 1
    assert read(store, range(3)) == [content(number) for number in range(3)]
    store.close()
    again = open_store(tmp_path)
    assert len(again.take_news().stored) == 3
    again.close()


def test_after_the_folder_is_removed_blocks_are_computed(tmp_path, caplog):
    store = open_store(tmp_path / "kv", segment_bytes=3000)
    put(store, range(2))
    for path in store.folder.iterdir():
        path.unlink()
    store.folder.rmdir()
    assert read(store, [0]) == [content(0)]
    put(store, range(2, 9))
    assert len(store.take_news().lost) >= 6
    store.close()


def opened(root, caplog):
    """The disk tier of an executor with headway-tiny's settings, and the log."""
    caplog.clear()
    folder = model_folder(None)
    options = EngineOptions(kv_disk=f"{root}:100MB", kv_memory=64 * 2**20)
    spec, settings, _, _ = plan_settings(folder, options)
    found = open_disk(folder, spec, settings, [])
    return found, caplog.text


def test_a_file_in_place_of_the_folder_is_logged_and_the_server_goes_on(tmp_path, caplog):
    (tmp_path / "kv").write_text("mine")
    found, said = opened(tmp_path / "kv", caplog)
    assert found is None and "The KV disk tier is off" in said and "--kv-disk" in said
    assert (tmp_path / "kv").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_logged_and_the_server_goes_on(
    tmp_path, caplog, monkeypatch
):
    """As on a read-only disk, where folders cannot be made."""

    def refuse(*_: object, **__: object):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    found, said = opened(tmp_path / "read-only" / "kv", caplog)
    assert found is None and "Read-only file system" in said
    assert "Name a folder that can be written" in said


def test_the_same_model_finds_its_folder_and_other_settings_another(tmp_path, caplog):
    first, _ = opened(tmp_path / "kv", caplog)
    assert first is not None
    folder = first.store.folder
    again, said = opened(tmp_path / "kv", caplog)
    assert again is None and "another server uses" in said
    first.store.close()
    again, _ = opened(tmp_path / "kv", caplog)
    assert again is not None and again.store.folder == folder
    again.store.close()
    spec, settings, _, _ = plan_settings(
        model_folder(None), EngineOptions(kv_disk=f"{tmp_path / 'kv'}:100MB", max_model_len=256)
    )
    other = open_disk(model_folder(None), spec, settings, [])
    assert other is not None and other.store.folder != folder
    other.store.close()


def test_random_weights_of_another_seed_are_another_folder(tmp_path):
    """And there are no weights to hash: a config.json is enough."""
    folders, model = set(), tmp_path / "model"
    model.mkdir()
    shutil.copy(model_folder(None) / "config.json", model)
    for seed in (1, 1, 2):
        options = EngineOptions(
            kv_disk=f"{tmp_path / 'kv'}:100MB", load_format="dummy", seed=seed,
            skip_tokenizer_init=True,
        )  # fmt: skip
        spec, settings, _, _ = plan_settings(model, options)
        found = open_disk(model, spec, settings, [])
        assert found is not None
        folders.add(found.store.folder)
        found.store.close()
    assert len(folders) == 2


def test_an_owner_is_erased_from_the_files(tmp_path):
    store = open_store(tmp_path)
    put(store, [1])
    put(store, [2, 3], OTHER)
    (path,) = store.folder.glob("*.kv")
    assert bytes(content(2)) in path.read_bytes() and OTHER in path.read_bytes()
    store.forget(OTHER[:16])
    assert store.flush(60)
    left = path.read_bytes()
    assert not any(bytes(content(number)) in left for number in (2, 3))
    assert OTHER not in left and key(2) not in left and bytes(content(1)) in left
    assert sorted(store.take_news().lost) == [(0, key(2)), (0, key(3))]
    assert read(store, [1]) == [content(1)] and read(store, [2]) is None
    store.forget(OWNER)
    assert store.flush(60)
    assert not list(store.folder.glob("*.kv")) and store.num_bytes == 0
    store.close()


# ── into and out of KV memory ───────────────────────────────────────────────────────────────────


def layers_of(dtype) -> list[KVLayer]:
    made = [KVLayer.zeros((6, 4, 2, 8), group, dtype, "cpu") for group in (0, 1, 0)]
    for layer in made:
        for part in layer.parts:
            part.copy_(torch.randint(-100, 100, part.shape))
    return made


def ended(table: TransferTable) -> StepResult:
    result = StepResult(0, [])
    while not (result.transfers_done or result.transfers_failed):
        table.report(result, wait=True)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_blocks_come_back_bit_for_bit_in_all_layers_of_their_group(tmp_path, dtype):
    layers = layers_of(dtype)
    store = open_store(tmp_path)
    table = TransferTable(None, DiskTransfers(layers, 2, store))
    before = [[part.clone() for part in layer.parts] for layer in layers]
    keys, owners = [key(1), key(2)], [OWNER, OWNER]
    table.keep(
        StepPlan(0, [], [], [], transfers=[
            Transfer(0, 0, [2, 5], "out", "disk", keys=keys, owners=owners)
        ])
    )  # fmt: skip
    for layer in layers:
        for part in layer.parts:
            part.zero_()
    table.begin([Transfer(1, 0, [4, 1], "in", "disk", keys=keys, limit_s=60.0)])
    result = ended(table)
    assert result.transfers_done == [1]
    (moved,) = [one for one in result.moved if one.direction == "in"]
    assert moved.asked_bytes == moved.moved_bytes == 2 * table.disk.block_bytes[0]
    for layer, old in zip(layers, before, strict=True):
        for part, was in zip(layer.parts, old, strict=True):
            if layer.group == 0:
                assert torch.equal(part[4], was[2]) and torch.equal(part[1], was[5])
                part[[1, 4]] = 0
            assert not part.any()
    store.close()


def test_a_late_read_is_abandoned_and_never_written(tmp_path, monkeypatch):
    layers = layers_of(torch.float32)
    store = open_store(tmp_path)
    table = TransferTable(None, DiskTransfers(layers, 2, store))
    gate, passed = threading.Event(), threading.Event()

    def slow(blocks, into, landed):
        def late():
            gate.wait(60)
            into[0][:] = bytes(len(into[0]))
            landed(True)
            passed.set()

        threading.Thread(target=late, daemon=True).start()

    monkeypatch.setattr(store, "read", slow)
    before = layers[0].k.clone()
    table.begin([Transfer(1, 0, [3], "in", "disk", keys=[key(1)], limit_s=0.05)])
    result = ended(table)
    assert result.transfers_failed == [1] and result.moved[0].moved_bytes == 0
    gate.set()
    assert passed.wait(60)
    table.report(StepResult(1, []), wait=True)
    assert torch.equal(layers[0].k, before)
    store.close()


def test_a_block_of_another_size_is_not_put_into_memory(tmp_path):
    layers = layers_of(torch.float32)
    store = open_store(tmp_path)
    put(store, [1])
    table = TransferTable(None, DiskTransfers(layers, 2, store))
    table.begin([Transfer(1, 0, [3], "in", "disk", keys=[key(1)], limit_s=60.0)])
    assert ended(table).transfers_failed == [1]
    store.close()


def test_a_segment_header_says_what_it_is():
    record = segments.Record((1, key(3)), OWNER, 7, 10, 0, bytes(32))
    header = segments.pack_header(record)
    assert len(header) == HEADER_BYTES and segments.parse_header(header, 7) == record


def test_other_files_named_like_a_segment_are_ignored(tmp_path, caplog):
    """A FIFO would block the start forever; none of them turns the tier off."""
    store = open_store(tmp_path)
    put(store, range(3))
    store.close()
    fifo, inside, link = (store.folder / f"0000000{number}.kv" for number in (7, 8, 9))
    for path in (fifo, tmp_path / ("a" * 32)):
        os.mkfifo(path)
    inside.mkdir()
    link.symlink_to("/dev/zero")
    again = open_store(tmp_path)
    put(again, range(3, 6))
    assert read(again, range(6)) == [content(number) for number in range(6)]
    again.close()
    assert all(
        f"{path} cannot be opened and is ignored: " in caplog.text for path in (fifo, inside, link)
    )
