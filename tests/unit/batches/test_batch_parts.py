"""The parts of files and batches: forms however they are split, lines, lanes, faults of disk and
engine, owners in turn, a stop at any line."""

import asyncio
import contextlib
import errno
import json
import logging
import random
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_runs import (
    PATH,
    Endpoint,
    begin,
    died,
    entry,
    jsonl,
    names_of,
    over,
    running,
    until,
    written,
)
from headway.batches import open_runner
from headway.batches.call import batch_body
from headway.batches.lines import check_file, read_body
from headway.batches.runner import Lane, Runner
from headway.core.errors import RequestError, StorageError
from in_process import fake_state

# ── lines ───────────────────────────────────────────────────────────────────────────────────


def checked(path: Path, **limits: Any) -> Any:
    given = {"endpoints": [PATH], "models": ["tiny", "other"], "unnamed": None}
    given["max_line_bytes"] = 1000
    return check_file(path, **(given | limits))


def test_lines_are_read_back_from_their_places(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"\n \n" + jsonl(entry("ü"), entry("b")) + b"\r\n" + jsonl(entry("c"))[:-1])
    found = checked(path)
    assert [(line.number, line.custom_id) for line in found.lines] == [(3, "ü"), (4, "b"), (6, "c")]
    assert found.model == "tiny" and not found.faults
    for line in found.lines:
        assert read_body(path, line) == (PATH, json.dumps(entry("")["body"]).encode())
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"'))
    with pytest.raises(RequestError, match="has changed"):
        read_body(path, found.lines[1])


def test_long_lines_and_too_many_are_faults(tmp_path: Path):
    path = tmp_path / "lines"
    long = entry("long", prompt="x" * 5000)
    path.write_bytes(jsonl(entry("a"), long, entry("b"), entry("c", model="other"), entry("d")))
    found = checked(path, max_lines=3)
    told = [(fault.line, fault.code) for fault in found.faults]
    assert told == [(2, "line_too_long"), (4, "mismatched_model")]
    path.write_bytes(jsonl(*(entry(f"{i}") for i in range(5))))
    told = [(fault.line, fault.code) for fault in checked(path, max_lines=3).faults]
    assert told == [(4, "too_many_lines")]


def test_faults_are_counted_beyond_those_kept(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"{\n" * 1500)
    found = checked(path)
    assert (found.num_faults, len(found.faults)) == (1500, 1000)


def test_a_line_without_a_model_asks_the_only_one(tmp_path: Path):
    path = tmp_path / "lines"
    bare = {"custom_id": "a", "method": "POST", "url": PATH, "body": {}}
    path.write_bytes(jsonl(bare))
    assert [line.custom_id for line in checked(path, unnamed="tiny").lines] == ["a"]
    (fault,) = checked(path, unnamed=None).faults
    assert (fault.code, fault.param) == ("missing_required_parameter", "body.model")


@pytest.mark.parametrize("name", ["stream", "background"])
def test_a_line_is_answered_as_a_whole(name: str):
    with pytest.raises(RequestError) as told:
        batch_body(b'{"model": "m", "%s": true}' % name.encode())
    assert (told.value.param, told.value.code) == (name, "unsupported_value")
    assert batch_body(b'{"%s": false}' % name.encode())


# ── the lane ────────────────────────────────────────────────────────────────────────────────


async def test_others_go_first_and_a_batch_never_starves():
    lane = Lane(3)
    for _ in range(3):
        await lane.enter()
    assert not lane.free
    lane.others = 1
    lane.leave()
    lane.leave()
    assert lane.busy == 1 and not lane.free
    lane.leave()
    assert lane.free
    await lane.enter()
    waiting = asyncio.create_task(lane.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    lane.others = 1
    lane.forget()
    await waiting
    assert lane.busy == 2


# ── the runner, over endpoints that misbehave ───────────────────────────────────────────────


async def test_a_batch_stopped_at_any_line_goes_on_where_it_was(tmp_path: Path):
    endpoint, chance, stops = Endpoint(), random.Random(5), 6
    async with running(tmp_path / "d", endpoint) as runner:
        batch_id = await begin(runner, names_of(700))
    for _ in range(stops):
        enough = endpoint.asked.total() + chance.randrange(1, 100)
        async with running(tmp_path / "d", endpoint) as runner:
            await until(lambda runner=runner, enough=enough: endpoint.asked.total() >= enough)
            await asyncio.sleep(chance.random() / 500)
    async with running(tmp_path / "d", endpoint) as runner:
        batch = await over(runner, batch_id)
    assert batch.status == "completed" and batch.request_counts.completed == 700
    assert batch.usage.total_tokens == 700 * 5
    found = written(runner, batch.output_file_id)
    assert found.keys() == set(names_of(700))
    assert all(line["response"]["body"]["echo"] == name for name, line in found.items())
    again = sum(endpoint.asked.values()) - 700
    assert again <= stops * 8, "only what was running when it stopped is asked again"
    with contextlib.closing(sqlite3.connect(tmp_path / "d" / "headway.db")) as database:
        assert database.execute("SELECT count(*) FROM lines").fetchone() == (0,)


async def test_lines_run_at_once_as_many_as_told(tmp_path: Path):
    """No line ends before so many run; that no more begin is seen until all have run."""
    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint, batch_concurrency=5) as runner:
        for others, most in ((0, 5), (1, 1)):
            runner.lane.others, endpoint.most = others, 0
            endpoint.gate.clear()
            batch_id = await begin(runner, names_of(60))
            await until(lambda most=most: endpoint.running >= most)
            endpoint.gate.set()
            assert (await over(runner, batch_id)).request_counts.completed == 60
            assert endpoint.most == most


async def test_owners_take_turns(tmp_path: Path):
    order: list[str] = []
    endpoint = Endpoint(order.append)
    endpoint.gate.clear()
    async with running(tmp_path / "d", endpoint, batch_concurrency=1) as runner:
        long = await begin(runner, names_of(300, "long"), owner="a")
        short = await begin(runner, names_of(10, "short"), owner="b")
        await until(lambda: {long, short} <= runner._jobs.keys())
        endpoint.gate.set()
        await over(runner, short)
        await over(runner, long)
    last = max(i for i, name in enumerate(order) if name.startswith("short"))
    assert last < 25, "the short batch did not wait for the long one"


async def test_a_line_that_kills_the_engine_fails_alone(tmp_path: Path):
    """The lines beside it die with it once; then each runs alone, and only one dies again."""
    together: set[str] = set()

    def rule(name: str) -> None:
        if name == "3" or (endpoint.running > 1 and not together):
            together.add(name)
            died(name)

    endpoint = Endpoint(rule)
    async with running(tmp_path / "d", endpoint, batch_concurrency=4) as runner:
        batch = await over(runner, await begin(runner, names_of(12)))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (11, 1)
        (line,) = written(runner, batch.error_file_id).values()
    assert line["custom_id"] == "3" and line["response"]["status_code"] == 500
    assert endpoint.asked["3"] == 2


async def test_a_busy_server_makes_a_line_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.batches.runner.WAIT_S", 0.01)
    refusals = iter([("not_ready", 503), ("rate_limit_exceeded", 429), ("overloaded", 503)])

    def rule(name: str) -> None:
        for code, status in refusals:
            raise RequestError("Later.", code=code, status=status)

    async with running(tmp_path / "d", Endpoint(rule)) as runner:
        batch = await over(runner, await begin(runner, ["a"]))
        assert batch.request_counts.completed == 1


async def test_our_own_fault_is_a_failed_line(tmp_path: Path):
    def rule(name: str) -> None:
        raise KeyError("secret")

    async with running(tmp_path / "d", Endpoint(rule)) as runner:
        batch = await over(runner, await begin(runner, ["a"]))
        text = json.dumps(written(runner, batch.error_file_id))
        assert '"status_code": 500' in text and "secret" not in text


async def test_a_batch_expires_with_what_it_has(tmp_path: Path):
    """Some lines are answered, the others never end: they are told apart in the files."""
    endpoint = Endpoint(stuck_after=5)
    async with running(tmp_path / "d", endpoint) as runner:
        soon = runner.files.now_s + 2
        batch = await over(runner, await begin(runner, names_of(30), expires_at=soon))
        assert batch.status == "expired" and batch.expired_at and batch.finalizing_at
        output = written(runner, batch.output_file_id)
        errors = written(runner, batch.error_file_id)
    assert len(output) <= 5 and output.keys() | errors.keys() == set(names_of(30))
    assert output.keys().isdisjoint(errors) and endpoint.running == 0
    assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


async def test_a_batch_of_another_model_waits(tmp_path: Path):
    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint) as runner:
        runner.lane.others = 1
        batch_id = await begin(runner, names_of(500))
        while not endpoint.asked:
            await asyncio.sleep(0.01)
    asked = endpoint.asked.total()
    runner = open_runner(fake_state(data_dir=str(tmp_path / "d")))
    runner.state.models = {"another": runner.state.models["tiny"]}
    runner.endpoints = {PATH: endpoint}
    await runner.start()
    await asyncio.sleep(0.1)
    assert (await runner.batches.get(batch_id)).status == "in_progress"
    await runner.stop()
    assert endpoint.asked.total() == asked
    async with running(tmp_path / "d", endpoint) as runner:
        assert (await over(runner, batch_id)).request_counts.completed == 500


# ── the disk ────────────────────────────────────────────────────────────────────────────────


async def test_a_full_disk_makes_batches_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SQLite's own limit of pages: the statements fail as they do on a full disk."""
    monkeypatch.setattr("headway.batches.runner.DISK_WAIT_S", 0.05)

    def pages(runner: Runner, count: int) -> Any:
        connection = runner.batches.database._connection
        assert connection is not None
        return runner.batches.database.run(
            lambda c: c.execute(f"PRAGMA max_page_count = {count}").fetchone()
        )

    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint) as runner:
        runner.lane.others = 1
        batch_id = await begin(runner, names_of(400))
        while not endpoint.asked:
            await asyncio.sleep(0.01)
        await pages(runner, 1)  # not below what is used
        while not runner._disk_is_full:
            await asyncio.sleep(0.01)
        with pytest.raises(StorageError) as caught:
            await begin(runner, names_of(400), owner="x" * 4000)
        assert caught.value.status == 507 and caught.value.code == "storage_full"
        assert str(tmp_path) not in str(caught.value)
        assert (await runner.batches.get(batch_id)).status == "in_progress"
        await pages(runner, 2**30)
        batch = await over(runner, batch_id)
        assert batch.request_counts.completed == 400
        assert written(runner, batch.output_file_id).keys() == set(names_of(400))
    assert endpoint.asked.total() == 400, "a result waits for the disk, it is not asked again"


async def test_output_files_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.batches.runner.DISK_WAIT_S", 0.01)
    calls = iter(range(3))

    def fsync(descriptor: int) -> None:
        for _ in calls:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headway.batches.store.os.fsync", fsync)
    async with running(tmp_path / "d", Endpoint()) as runner:
        batch = await over(runner, await begin(runner, names_of(5)))
        assert batch.status == "completed"
        on_disk = {path.name for path in runner.batches.database.files.iterdir()}
        assert on_disk == {batch.input_file_id, batch.output_file_id}


async def test_files_written_but_not_recorded_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a kill between the output file and its record leaves."""

    def killed(*_: Any) -> None:
        raise RuntimeError("as if killed")

    endpoint = Endpoint()
    with monkeypatch.context() as patch:
        patch.setattr("headway.batches.store.insert", killed)
        async with running(tmp_path / "d", endpoint) as runner:
            batch_id = await begin(runner, names_of(9))
            while (await runner.batches.get(batch_id)).status != "finalizing" or runner._lives:
                await asyncio.sleep(0.01)
    async with running(tmp_path / "d", endpoint) as runner:
        batch = await over(runner, batch_id)
        assert written(runner, batch.output_file_id).keys() == set(names_of(9))
        assert batch.request_counts.completed == 9
    assert endpoint.asked.total() == 9


async def test_a_second_server_is_told_and_what_was_cut_is_swept(tmp_path: Path):
    async with running(tmp_path / "d", Endpoint()) as first:
        batch = await over(first, await begin(first, ["a"]))
        async with running(tmp_path / "d", Endpoint()) as second:
            with pytest.raises(StorageError) as caught:
                await second.batches.get(batch.id)
            assert caught.value.code == "storage_in_use" and caught.value.status == 503
        for name in ("file-" + "0" * 32, "file-" + "1" * 32 + ".part"):
            (tmp_path / "d" / "files" / name).write_bytes(b"x")
    async with running(tmp_path / "d", Endpoint()) as runner:
        assert await runner.batches.get(batch.id) == batch
        left = {path.name for path in (tmp_path / "d" / "files").iterdir()}
        assert left == {batch.input_file_id, batch.output_file_id}
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


async def test_a_second_server_says_once_what_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("headway.batches.runner.SWEEP_S", 0.001)
    async with running(tmp_path / "d", Endpoint()) as first:
        await over(first, await begin(first, ["a"]))
        async with running(tmp_path / "d", Endpoint()):
            await asyncio.sleep(0.05)
    (line,) = [record for record in caplog.records if record.levelno > logging.INFO]
    assert line.levelno == logging.WARNING
    assert "files and batches are not served here: Another server" in line.getMessage()


async def test_a_second_server_without_a_folder_of_its_own_name_takes_that_of_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    async with running("", Endpoint()) as first:
        await over(first, await begin(first, ["a"]))
        async with running("", Endpoint(), port=8001) as second:
            assert (await second.batches.page("me", None, 9))[0] == []
            ours = await over(second, await begin(second, ["b"]))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    async with running("", Endpoint(), port=8001) as again:
        assert await again.batches.get(ours.id) == ours
        assert again.files.path("x").parent == tmp_path / "headway" / "port-8001" / "files"


async def test_a_folder_that_is_taken_while_two_run_turns_the_other_to_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both have begun before anything was kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with running("", Endpoint()) as first, running("", Endpoint(), port=8001) as second:
        await over(first, await begin(first, ["a"]))
        batch = await over(second, await begin(second, ["b"]))
        assert written(second, batch.output_file_id).keys() == {"b"}
    assert (tmp_path / "headway" / "port-8001" / "headway.db").exists()


async def test_a_broken_database_is_told(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "headway.db").write_bytes(b"not a database" * 100)
    async with running(tmp_path / "d", Endpoint()) as runner:
        with pytest.raises(StorageError) as caught:
            await runner.batches.get("batch_1")
        assert caught.value.code == "storage_unusable"


async def test_nothing_is_made_before_something_is_kept(tmp_path: Path):
    async with running(tmp_path / "d", Endpoint()) as runner:
        with pytest.raises(RequestError, match="There is no batch"):
            await runner.batches.get("batch_1")
        assert await runner.files.page(
            "me", purpose=None, after=None, limit=5, newest_first=True
        ) == ([], False)
    assert not (tmp_path / "d").exists()


async def test_expired_files_go(tmp_path: Path):
    async with running(tmp_path / "d", Endpoint()) as runner:
        batch = await over(runner, await begin(runner, ["a"], output_lifetime_s=-1))
        name = batch.output_file_id or ""
        assert runner.files.path(name).exists()
        with pytest.raises(RequestError):
            await runner.files.get(name, "me")
        await runner.files.remove_expired()
        assert not runner.files.path(name).exists()


@pytest.mark.parametrize(
    ("body", "service_class"),
    [
        (b"{}", "batch"),
        (b'{"model": "m"}', "batch"),
        (b'{"model": "m", "service_class": null} ', "batch"),
        (b'{"service_tier": "auto", "stream": false, "model": "m"}', "batch"),
        (b'{"model": "m", "service_class": "mine"}', "mine"),
        (b'{"model": "m", "service_tier": "flex"}', None),
    ],
)
def test_a_line_is_of_the_class_of_batches_unless_it_names_one(
    body: bytes, service_class: str | None
):
    wanted = msgspec.json.decode(body) | ({"service_class": service_class} if service_class else {})
    assert msgspec.json.decode(batch_body(body)) == wanted


def test_the_values_of_a_line_are_not_made():
    """Its endpoint counts them first; here they pass as bytes."""
    bomb = b'{"model": "m", "x": [' + b"[[]]," * 1_000_000 + b"1]"
    assert batch_body(bomb + b"}").startswith(bomb)
    with pytest.raises(RequestError):
        batch_body(bomb + b', "stream": true}')
    with pytest.raises(RequestError):
        batch_body(bomb)
