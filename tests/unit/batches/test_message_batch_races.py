"""Message batches at a disk that is full, and two clients that delete the same one."""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from batch_calls import wait_until
from batch_runs import Endpoint, begin, names_of, over, running
from headway.batches.files.store import new_id
from headway.batches.lines import MESSAGES
from headway.batches.message_batches import contents, counts_of, open_results
from headway.batches.store import MESSAGE_PREFIX
from headway.core.errors import RequestError, StorageError
from in_process import InProcess

REQUEST = {
    "custom_id": "a",
    "params": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


async def test_what_is_deleted_is_not_found(tmp_path: Path) -> None:
    """Of two that delete it, or one that cancels it meanwhile, the second finds nothing."""
    async with running(tmp_path, Endpoint()) as runner:
        batch = await over(runner, await begin(runner, names_of(2)))
        get = runner.batches.get

        async def deleted_since(*given: Any) -> Any:
            found = await get(*given)
            await runner.batches.delete(batch.id)
            return found

        runner.batches.get = deleted_since  # type: ignore[method-assign]
        for work in (runner.batches.cancel(batch.id, "me"), runner.batches.delete(batch.id)):
            with pytest.raises(RequestError) as caught:
                await work
            assert caught.value.status == 404


async def test_results_that_are_read_are_read_to_their_end(tmp_path: Path) -> None:
    """They are deleted as soon as the answer begins; whoever comes later finds nothing."""
    async with running(tmp_path, Endpoint()) as runner:
        batch = await over(runner, await begin(runner, names_of(3)))
        opened = open_results(runner, batch)
        await runner.files.remove([str(batch.output_file_id)])
        assert len(b"".join(contents(opened)).splitlines()) == 3
        with pytest.raises(RequestError) as caught:
            await asyncio.to_thread(open_results, runner, batch)
        assert caught.value.status == 404


async def test_requests_that_do_not_run_in_time_are_expired(tmp_path: Path) -> None:
    """Those answered succeed, the others are `expired`, and the counts say how many."""
    async with running(tmp_path, Endpoint(stuck_after=5)) as runner:
        soon = runner.files.now_s + 2
        fields = {"expires_at": soon, "id": new_id(MESSAGE_PREFIX), "endpoint": MESSAGES}
        batch_id = await begin(runner, names_of(30), **fields)
        batch = await over(runner, batch_id)
        lines = b"".join(contents(open_results(runner, batch))).splitlines()
    ends = Counter(json.loads(line)["result"]["type"] for line in lines)
    counts = counts_of(batch, is_over=True)
    assert len(lines) == 30 and ends["expired"] >= 25
    assert counts["expired"] == ends["expired"] and counts["succeeded"] == ends["succeeded"]
    assert sum(counts.values()) == 30 and counts["processing"] == counts["canceled"] == 0


def test_requests_beyond_the_quota_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota of the key is asked before its bytes are on the disk."""
    live, synced = InProcess(tmp_path / "data", file_quota=1000), list[int]()
    try:
        monkeypatch.setattr(os, "fsync", synced.append)
        with httpx.Client(base_url=live.url, timeout=60) as http:
            requests = [{**REQUEST, "custom_id": f"r{number}"} for number in range(20)]
            refused = http.post("/v1/messages/batches", json={"requests": requests})
        assert refused.status_code == 413, refused.text
        assert not synced and not list((tmp_path / "data" / "files").iterdir())
    finally:
        live.close()


@pytest.mark.timeout(60)
def test_a_batch_that_is_kept_begins_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told of it: one that asks again would have two."""
    live = InProcess(tmp_path / "data")
    try:
        begin, full = live.runner.batches.begin, [True]

        async def full_once(*given: Any) -> Any:
            if full:
                full.clear()
                raise StorageError("The disk is full.")
            return await begin(*given)

        monkeypatch.setattr(live.runner.batches, "begin", full_once)
        with httpx.Client(base_url=live.url, timeout=60) as http:
            made = http.post("/v1/messages/batches", json={"requests": [REQUEST]})
            assert made.status_code == 200, made.text
            path = f"/v1/messages/batches/{made.json()['id']}"
            wait_until(lambda: http.get(path).json()["processing_status"] == "ended")
            assert http.get(f"{path}/results").json()["result"]["type"] == "succeeded"
    finally:
        live.close()
