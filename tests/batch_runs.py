"""Batches that run on a scripted endpoint, and what they wrote."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.batches import open_runner
from headway.batches.files.store import File, new_id
from headway.batches.lines import MESSAGES
from headway.batches.runner import Runner
from headway.batches.store import BatchRecord
from headway.core.errors import RequestError
from headway.core.principal import Principal
from in_process import fake_state

PATH = "/v1/completions"


def entry(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": PATH,
        "body": {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, **body},
    }


def jsonl(*entries: Any) -> bytes:
    return b"".join(json.dumps(content).encode() + b"\n" for content in entries)


class Endpoint:
    """Answers with the line's own name; `rule` says what happens first.

    After `stuck_after` answers it gives none any more, and none while its gate is shut: so what
    runs at once is counted, however fast the machine is.
    """

    def __init__(
        self, rule: Callable[[str], None] = lambda name: None, stuck_after: int = 10**9
    ) -> None:
        self.rule = rule
        self.stuck_after = stuck_after
        self.asked: Counter[str] = Counter()
        self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == "POST" and scope["caller"].principal.service_class == "batch"
        body = msgspec.json.decode((await receive())["body"])
        assert body["service_class"] == "batch"
        name = body["user"]
        self.asked[name] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001 if self.asked.total() <= self.stuck_after else 600)
            await self.gate.wait()
            self.rule(name)
        finally:
            self.running -= 1
        answer = {"echo": name, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": msgspec.json.encode(answer)})


def died(name: str) -> None:
    """As a rule of an endpoint: the engine dies of this line."""
    raise RequestError("The engine stopped.", code="engine_died", status=503)


@contextlib.asynccontextmanager
async def running(folder: Path | str, endpoint: ASGIApp, **options: Any) -> AsyncIterator[Runner]:
    """A runner on the folder; what is unfinished there goes on."""
    runner = open_runner(fake_state(data_dir=str(folder), **options))
    runner.endpoints = {PATH: endpoint, MESSAGES: endpoint}
    await runner.start()
    try:
        yield runner
    finally:
        await runner.stop()


async def begin(runner: Runner, names: list[str], owner: str = "me", **fields: Any) -> str:
    """A batch of these lines, as its creation would leave it."""
    await runner.batches.unfinished()  # opens the folder
    file = File(
        id=new_id("file-"), bytes=1, created_at=runner.files.now_s, filename="x", purpose="batch"
    )
    part = runner.files.path(file.id + ".part")
    part.write_bytes(jsonl(*(entry(name, user=name) for name in names)))
    await runner.files.add(file, owner, part)
    now_s = runner.files.now_s
    batch = BatchRecord(
        input_file_id=file.id,
        created_at=now_s,
        principal=Principal(name=owner),
        **{"id": new_id("batch_"), "endpoint": PATH, "expires_at": now_s + 3600, **fields},
    )
    await runner.batches.add(batch, 100)
    runner.take(batch.id)
    return batch.id


async def until(condition: Callable[[], Any]) -> None:
    """Wait for `condition`; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.001)


async def over(runner: Runner, batch_id: str) -> BatchRecord:
    async with asyncio.timeout(60):
        while True:
            batch = await runner.batches.get(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


def written(runner: Runner, file_id: str | None) -> dict[str, Any]:
    """custom_id → line of an output file; every id once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in runner.files.path(file_id).read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def names_of(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]
