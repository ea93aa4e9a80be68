"""Batches at the moments that lie close together: what ends, begins or is taken away in between."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from batch_runs import Endpoint, begin, died, names_of, over, running, written
from headway.batches.runner import BatchJob, Runner
from headway.batches.store import BatchRecord
from headway.core.errors import RequestError


async def job_of(runner: Runner, batch_id: str) -> BatchJob:
    """The batch's lines, once they are in progress."""
    while batch_id not in runner._jobs:
        await asyncio.sleep(0.001)
    return runner._jobs[batch_id]


async def test_a_batch_cancelled_as_its_line_begins_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The task of the line is cancelled before its first step: no `finally` of it ever runs."""
    create_task = asyncio.create_task
    async with running(tmp_path, Endpoint(), batch_concurrency=2) as runner:

        async def cancel_first(but: int) -> None:
            await runner.batches.cancel(batch_id, "me")

        def cancelled_at_once(work: Any) -> Any:
            task = create_task(work)
            if work.__name__ == "_answer":
                task.cancel()
                runner.cancel(batch_id)
            return task

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_task", cancelled_at_once)
            patch.setattr(runner.lane, "empty", cancel_first)
            batch_id = await begin(runner, names_of(4))
            batch = await over(runner, batch_id)
        assert batch.status == "cancelled" and not written(runner, batch.output_file_id)
        assert runner.lane.busy == 0
        next_id = await begin(runner, names_of(4))
        assert len(written(runner, (await over(runner, next_id)).output_file_id)) == 4


async def test_a_batch_cancelled_between_its_check_and_its_lines_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    endpoint = Endpoint(stuck_after=0)
    async with running(tmp_path, endpoint) as runner:
        begun = runner.batches.begin

        async def cancelled_after(batch_id: str, checked: Any) -> BatchRecord:
            batch = await begun(batch_id, checked)
            await runner.batches.cancel(batch_id, "me")
            runner.cancel(batch_id)
            return batch

        monkeypatch.setattr(runner.batches, "begin", cancelled_after)
        batch = await over(runner, await begin(runner, names_of(4)))
        assert batch.status == "cancelled" and not written(runner, batch.output_file_id)


async def test_a_line_that_waits_to_run_alone_is_still_to_be_run(tmp_path: Path):
    """The last of the others ends while it waits for them: the batch is not over by that."""
    released = asyncio.Event()
    answers = Endpoint(lambda name: died(name) if answers.asked.total() == 1 else None)

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if msgspec.json.decode(message["body"])["user"] == "slow":
            await released.wait()
        await answers(scope, partial(asyncio.sleep, 0, message), send)

    async with running(tmp_path / "d", endpoint, batch_concurrency=2) as runner:
        batch_id = await begin(runner, ["x", "slow"])
        job = await job_of(runner, batch_id)
        while not answers.asked["x"] or job.waiting or job.alone or len(job.running) != 1:
            await asyncio.sleep(0.001)
        released.set()
        batch = await over(runner, batch_id)
        assert written(runner, batch.output_file_id).keys() == {"x", "slow"}
        assert batch.request_counts.completed == 2


async def test_a_line_that_fails_as_nobody_expected_is_left_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def broken(*_: Any) -> None:
        raise KeyError("nobody expected this")

    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(runner.batches, "finish_line", broken)
            batch_id = await begin(runner, names_of(3))
            while runner._lives:
                await asyncio.sleep(0.01)
        assert "nobody expected this" in caplog.text
        assert (await runner.batches.get(batch_id)).status == "in_progress"
        assert runner.lane.busy == 0
    async with running(tmp_path / "d", endpoint) as runner:
        batch = await over(runner, batch_id)
        assert written(runner, batch.output_file_id).keys() == set(names_of(3))


async def test_a_file_deleted_since_it_was_found_makes_no_batch(tmp_path: Path):
    async with running(tmp_path / "d", Endpoint()) as runner:
        first = await over(runner, await begin(runner, ["a"]))
        await runner.files.delete(first.input_file_id, "me")
        with pytest.raises(RequestError) as told:
            await runner.batches.add(msgspec.structs.replace(first, id="batch_2"), 100)
        assert (told.value.status, told.value.code) == (404, "file_not_found")
        assert await runner.batches.unfinished() == []


async def test_a_file_that_a_batch_reads_expires_with_the_batch(tmp_path: Path):
    endpoint = Endpoint(stuck_after=0)
    async with running(tmp_path / "d", endpoint) as runner:
        batch_id = await begin(runner, names_of(2))
        path = runner.files.path((await runner.batches.get(batch_id)).input_file_id)
        await runner.batches.database.run(lambda c: c.execute("UPDATE files SET expires_at = 1"))
        while not endpoint.asked:
            await asyncio.sleep(0.01)
        await runner.files.remove_expired()
        assert path.exists()
        await runner.batches.cancel(batch_id, "me")
        runner.cancel(batch_id)
        await over(runner, batch_id)
        await runner.files.remove_expired()
        assert not path.exists()
