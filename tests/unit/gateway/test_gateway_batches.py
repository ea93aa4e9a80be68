"""Batches of a gateway: whatever its upstreams answer, a line ends, and is one line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from batch_runs import begin, over, written
from gateway_world import Stub, world
from headway.batches import open_runner
from headway.batches.results import message_result
from headway.gateway.app import make_app


class Indented(Stub):
    """Answers in JSON as OpenAI does, over several lines."""

    async def _plain(self, request: web.Request) -> web.Response:
        answer = await super()._plain(request)
        assert isinstance(answer.body, bytes)
        body = msgspec.json.format(answer.body, indent=2) + b"\n"
        return web.Response(body=body, content_type="application/json")


async def batch_of(stub: Stub, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A batch of two lines over this upstream, once it has ended, and its output."""
    async with world(stub, folder=folder) as live:
        runner = open_runner(live.state)
        make_app(live.state, runner)
        await runner.start()
        try:
            batch = await over(runner, await begin(runner, ["a", "b"]))
            return batch, written(runner, batch.output_file_id)
        finally:
            await runner.stop()


@pytest.mark.timeout(60)
async def test_an_answer_of_many_lines_is_one_line(tmp_path: Path) -> None:
    batch, lines = await batch_of(Indented("a"), tmp_path)
    assert batch.request_counts.completed == 2 and batch.usage.input_tokens == 20
    assert lines["a"]["response"]["body"]["choices"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "told",
    [
        {"completion_tokens": None},
        {"prompt_tokens_details": {"cached_tokens": None}},
        {"completion_tokens": 1.5},
        {"completion_tokens": -(10**30)},
    ],
)
async def test_usage_that_is_none_costs_no_line(tmp_path: Path, told: dict[str, Any]) -> None:
    stub = Stub("a")
    stub.told = told
    batch, lines = await batch_of(stub, tmp_path)
    assert batch.status == "completed" and set(lines) == {"a", "b"}
    assert batch.request_counts.completed == 2 and batch.usage.output_tokens >= 0


def test_a_message_is_one_line_of_utf8() -> None:
    """What an upstream writes into its answer makes no line of another request."""
    body = b'{"type": "message",\n"content": [{"text": "\xff"}],\n"usage": {"input_tokens": null}}'
    result = message_result("a", 200, "r", body)
    found = msgspec.json.decode(result.line)
    assert b"\n" not in result.line and found["result"]["message"]["type"] == "message"
    assert not result.failed and result.input_tokens == 0
